// Mixture-of-Experts layer with all experts on this GPU: a memset and five kernels from the
// router's expert ids to the result, without any wait on the host. Rows are counted and permuted;
// the first GEMM gathers them and gates its tiles; the second reads them sorted; weighted sums
// follow. If experts get many rows, a sixth kernel sorts them before the first GEMM or concurrently
// with it.
//
// A layer that trains saves its last call's rows and the first GEMM's output for a backward pass:
// rows are gathered first, and the gate is a separate kernel.
//
// With e4m3 weights, rows are quantized before each GEMM, as quantize_rows does
// (tandem/quantize.h), and both GEMMs multiply codes. Inputs and outputs remain bf16, as does the
// gate's output before it is quantized.
//
// Memory: (ffn + hidden) x padded rows of the shape's dtype, at most rows x top_k + 127 per expert.
// Training: gradients.h's in addition. With e4m3 weights: ffn + 8 bytes more per padded row.
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
  /// A kernel gathers rows before the first GEMM; always if `trains`.
  bool sorts_first = false;
  /// Weights are e4m3 codes with a scale per row. Rows that are sorted first are quantized in the
  /// same pass. Not with `trains`.
  bool e4m3 = false;
  bool pairs = false;  ///< blocks of the GEMMs of sorted rows work in pairs
  /// If above 0, with `sorts_first`: blocks that sort concurrently with the first GEMM. Not with
  /// e4m3 weights.
  int sorting_blocks = 0;
};
/// The fastest form, within 5 % on an H100 (docs/results/gpu-moe.md).
LocalMoeForm form_of(const MoeShape& shape, bool trains = false, bool e4m3 = false);

/// Scales of e4m3 weights, one per row (an output feature of an expert): f32, [experts x 2 x ffn]
/// and [experts x hidden], 16-byte aligned.
struct MoeScales {
  Tensor w_in, w_out;
};

class LocalMoe {
 public:
  /// `shape.tp` must be 1; bf16 or f16; with e4m3 weights bf16, and hidden and ffn multiples of 16.
  /// Throws InvalidArgument.
  explicit LocalMoe(const MoeShape& shape) : LocalMoe(shape, form_of(shape)) {}
  LocalMoe(const MoeShape& shape, const LocalMoeForm& form);

  /// Operands as for MoeLayer::forward, on this GPU; `out` in f32 or the shape's dtype. `scales`:
  /// only for e4m3 weights. A routing to an invalid expert is counted in refused() and adds nothing
  /// to its row.
  void forward(const Tensor& x, const MoeRouting& routing, const Tensor& w_in, const Tensor& w_out,
               const Tensor& out, cudaStream_t stream, const MoeScales& scales = {});
  /// Operands as for MoeLayer::backward, after the last forward pass, whose routing is `routing`.
  /// Requires `trains`.
  void backward(const Tensor& dout, const MoeRouting& routing, const Tensor& w_in,
                const Tensor& w_out, const Tensor& dx, const Tensor& dweights, const Tensor& dw_in,
                const Tensor& dw_out, cudaStream_t stream);
  /// Routings so far to an invalid expert. Blocks until `stream` is empty.
  int dropped(cudaStream_t stream) const;

  // Steps of `forward`, for measurements.
  void permute(const MoeRouting& routing, cudaStream_t stream);
  void multiply_in(const Tensor& x, const Tensor& w_in, cudaStream_t stream,
                   const MoeScales& scales = {});
  /// Called before, with `sorts_first` or e4m3 weights.
  void prepare(const Tensor& x, cudaStream_t stream);
  void gate(cudaStream_t stream);            ///< after, with `trains`
  void quantize_inner(cudaStream_t stream);  ///< after, with e4m3 weights
  void multiply_out(const Tensor& w_out, cudaStream_t stream, const MoeScales& scales = {});
  void sum(const MoeRouting& routing, const Tensor& out, cudaStream_t stream);

  // Steps of `backward`.
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
    DeviceMemory routing_idx;
  };
  /// Additional memory for e4m3 weights.
  struct Codes {
    explicit Codes(const ExpertsShape& shape);
    DeviceMemory inner;                   ///< [padded rows, ffn]
    DeviceMemory x_scales, inner_scales;  ///< [padded rows]
  };
  SortedRows sorted() const;
  /// Destination of gathered or quantized rows. Shared with the results, which come later.
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
  DeviceMemory counts_, source_, positions_, dropped_, group_rows_;
  DeviceMemory ready_;  ///< permuted rows of each row tile
  int in_table_ = 0;
  std::optional<Training> training_;
  std::optional<Codes> codes_;
};

}  // namespace tandem::gpu
