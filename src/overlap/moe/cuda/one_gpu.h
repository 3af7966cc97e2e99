// A Mixture-of-Experts layer whose experts are all on this GPU: a memset and five kernels between a
// router's choice and the result, and nothing that the host waits for. Rows are counted and get
// places; the first product gathers them and gates its tiles; the second multiplies what lies
// sorted; weighted sums end it. Where experts get many rows a sixth kernel sorts them for the first
// product, before it or beside it.
//
// One that trains keeps its last call's rows and what the first product made of them for a backward
// pass: rows are gathered first, and the gate is a kernel of its own.
//
// With e4m3 weights rows are quantized before each product, as quantize_rows does it
// (tandem/quantize.h), and both products are of codes. What goes in and out stays bf16, and so does
// what the gate makes before it is quantized.
//
// Memory: (ffn + hidden) x padded rows of the shape's dtype, at most rows x top_k + 127 for each
// expert. One that trains: gradients.h's besides. With e4m3 weights: ffn + 8 bytes more for
// each padded row.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <optional>

#include "core/cuda/handles.h"
#include "gemm/cuda/grouped.h"
#include "overlap/moe/cuda/gradients.h"
#include "overlap/moe/cuda/permute.h"
#include "tandem/moe.h"

namespace tandem::gpu {

struct LocalMoeForm {
  bool trains = false;
  /// Rows are gathered by a kernel before the first product; of one that trains always.
  bool sorts_first = false;
  /// Weights are e4m3 codes with a scale for each row. Rows that are sorted first are quantized on
  /// the way. Not of one that trains.
  bool e4m3 = false;
  bool pairs = false;  ///< blocks of the products of sorted rows work in pairs
  /// Above 0, of one that sorts first: so many blocks do it beside the first product. Not with e4m3
  /// weights.
  int sorting_blocks = 0;
};
/// What is fastest, within 5 % on an H100 (docs/results/gpu-moe.md).
LocalMoeForm form_of(const MoeShape& shape, bool trains = false, bool e4m3 = false);

/// Of e4m3 weights, one for each of their rows (an output feature of an expert): f32,
/// [experts x 2 x ffn] and [experts x hidden], 16-byte aligned.
struct MoeScales {
  Tensor w_in, w_out;
};

class LocalMoe {
 public:
  /// `shape.tp` is 1; bf16 or f16; with e4m3 weights bf16, and hidden and ffn multiples of 16.
  /// Throws InvalidArgument.
  explicit LocalMoe(const MoeShape& shape) : LocalMoe(shape, form_of(shape)) {}
  LocalMoe(const MoeShape& shape, const LocalMoeForm& form);

  /// MoeLayer::forward's operands, on this GPU: f32 or the shape's dtype for `out`. `scales`: of
  /// e4m3 weights alone. A choice that is no expert counts in refused() and its row gets nothing of
  /// it.
  void forward(const Tensor& x, const MoeRouting& routing, const Tensor& w_in, const Tensor& w_out,
               const Tensor& out, cudaStream_t stream, const MoeScales& scales = {});
  /// MoeLayer::backward's operands, of the last forward pass, whose routing is `routing`. Only of
  /// one that trains.
  void backward(const Tensor& dout, const MoeRouting& routing, const Tensor& w_in,
                const Tensor& w_out, const Tensor& dx, const Tensor& dweights, const Tensor& dw_in,
                const Tensor& dw_out, cudaStream_t stream);
  /// Choices so far that were no expert. Blocks until `stream` is empty.
  int refused(cudaStream_t stream) const;

  // The steps of `forward`, for measuring.
  void place(const MoeRouting& routing, cudaStream_t stream);
  void multiply_in(const Tensor& x, const Tensor& w_in, cudaStream_t stream,
                   const MoeScales& scales = {});
  /// Before, of one that sorts first or has e4m3 weights.
  void prepare(const Tensor& x, cudaStream_t stream);
  void gate(cudaStream_t stream);            ///< behind, of one that trains
  void quantize_inner(cudaStream_t stream);  ///< behind, with e4m3 weights
  void multiply_out(const Tensor& w_out, cudaStream_t stream, const MoeScales& scales = {});
  void sum(const MoeRouting& routing, const Tensor& out, cudaStream_t stream);

  // The steps of `backward`.
  void gather_dout(const Tensor& dout, cudaStream_t stream);
  void gate_backward(const MoeRouting& routing, const Tensor& dweights, cudaStream_t stream);
  void sum_dx(const Tensor& dx, cudaStream_t stream);
  ExpertGradients& gradients() { return training().gradients; }
  void add_dw_in(const Tensor& dw_in, cudaStream_t stream);
  void add_dw_out(const Tensor& dw_out, cudaStream_t stream);

 private:
  struct Training {
    explicit Training(const ExpertsShape& shape);
    MoeSaved saved;
    ExpertGradients gradients;
    DeviceMemory choice;
  };
  /// What e4m3 weights need besides.
  struct Codes {
    explicit Codes(const ExpertsShape& shape);
    DeviceMemory inner;                   ///< [padded rows, ffn]
    DeviceMemory x_scales, inner_scales;  ///< [padded rows]
  };
  SortedRows sorted() const;
  /// Where rows are gathered to, or quantized to. Results come later.
  void* prepared_x() const { return training_ ? training_->saved.x.data() : results_.data(); }
  Training& training();
  void check_operands(const Tensor& x, const MoeRouting& routing, const Tensor& w_in,
                      const Tensor& w_out, const Tensor& out, const MoeScales& scales) const;
  void check_scales(const char* name, const Tensor& scales, int64_t rows) const;

  MoeShape shape_;
  LocalMoeForm form_;
  ExpertsShape experts_;
  std::unique_ptr<GroupedGemm> in_, out_;
  int64_t padded_rows_;
  DeviceMemory inner_, results_;  ///< [padded rows, ffn], [padded rows, hidden]
  DeviceMemory counts_, source_, place_, refused_, group_rows_;
  DeviceMemory ready_;  ///< rows of each row tile that are in place
  int in_table_ = 0;
  std::optional<Training> training_;
  std::optional<Codes> codes_;
};

}  // namespace tandem::gpu
