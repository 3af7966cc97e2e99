// What the dense operators share: their shape, and the checks and the choice of a way.
#pragma once

#include <functional>

#include "collectives/cuda/all_reduce.h"
#include "kernels/cuda/scaled_gemm.h"
#include "overlap/cuda/measure.h"
#include "overlap/cuda/ways.h"
#include "overlap/margin.h"
#include "tandem/collectives.h"
#include "tandem/norm.h"
#include "tandem/tensor.h"

namespace tandem::gpu {

struct DenseShape {
  int64_t m;  ///< rows over all ranks (AG, RS) or on each (AR)
  int64_t n;  ///< output features: this rank's (AG) or all (RS, AR)
  int64_t k;  ///< input features: all (AG) or this rank's (RS, AR)
  DType dtype = DType::bf16;
  bool weight_is_kn = false;  ///< weight stored [K, N] instead of [N, K]
  bool bias = false;          ///< [N]; AG: every rank's own; RS, AR: added once
  DType out = DType::bf16;    ///< e4m3: of out, bias and what sums travel in; else they are `dtype`
  Scaling scaling = Scaling::tensor;  ///< e4m3
  bool keep_gathered = false;         ///< AG+GEMM: the gather has the own rows too
  bool add_norm = false;              ///< GEMM+AR: an AddNorm follows the sum

  bool scaled() const { return dtype == DType::e4m3; }
  bool scaled_by_row() const { return scaled() && scaling == Scaling::row; }
  DType result() const { return scaled() ? out : dtype; }
  /// This product for `rows` of x.
  GemmShape product(int64_t rows, bool with_bias) const {
    return {rows,      n,
            k,         dtype,
            result(),  weight_is_kn,
            with_bias, scaled() ? std::optional(scaling) : std::nullopt};
  }
  /// Of the rows from `first_row` on. `scales`: checked before; none unless the shape has some.
  ScalePointers pointers(const Scales* scales, int64_t first_row = 0) const;
};

struct Extent {
  DType dtype;
  int64_t rows, columns;
};
/// Of the matrices that an operator is given.
struct OperandExtents {
  Extent x, weight, out;
};
OperandExtents extents_of(const DenseShape& shape, int64_t x_rows, int64_t out_rows);

/// A matrix in memory of its own, zero at first.
struct Scratch {
  DeviceMemory memory;
  Tensor tensor;
  explicit Scratch(const Extent& e)
      : memory(size_t(e.rows * e.columns) * size_of(e.dtype)),
        tensor(memory.view(e.dtype, {e.rows, e.columns})) {}
};

/// What an AddNorm needs, zero at first.
struct AddNormScratch {
  Scratch residual, hidden;
  DeviceMemory gain;
  AddNorm add_norm;
  explicit AddNormScratch(const Extent& out)
      : residual(out), hidden(out), gain(size_t(out.columns) * size_of(out.dtype)) {
    add_norm = {residual.tensor, gain.view(out.dtype, {out.columns}), hidden.tensor, 1e-5f};
  }
};

/// The cuBLASLt handle and workspace that this rank's operators share.
LtContext& lt_context(GpuCommunicator& comm);

/// Whether this GPU runs the kernels that are compiled for sm_90a alone, and may.
bool has_fused_kernels(const GpuCommunicator& comm);

/// Collective. Throws InvalidArgument for negative sizes, dtypes that are not f32, bf16, f16 or
/// e4m3, rows that are not multiples of 16 bytes, or what e4m3 does not take; Mismatch when ranks
/// differ in what they must share.
void check_shape(GpuCommunicator& comm, std::string_view op, const DenseShape& shape, bool same_n,
                 bool same_k);
/// Throws InvalidArgument naming the operand of `op` unless `tensor` is this contiguous matrix on
/// this GPU.
void check_matrix(const GpuCommunicator& comm, std::string_view op, std::string_view operand,
                  const Tensor& tensor, DType dtype, int64_t rows, int64_t columns);
void check_operands(const GpuCommunicator& comm, std::string_view op, const DenseShape& shape,
                    int64_t x_rows, int64_t out_rows, const Tensor& x, const Tensor& weight,
                    const Tensor& out, const Tensor* bias, const Scales* scales);
/// Throws InvalidArgument unless it is there as the shape says, and is what AddNorm asks for.
void check_add_norm_operands(const GpuCommunicator& comm, std::string_view op,
                             const DenseShape& shape, const AddNorm* add_norm);

/// `variant`; throws InvalidArgument naming `way` unless it is one of that way's `variants`.
int known_variant(std::string_view op, Way way, int variant, int variants);

/// Collective: the index of the name that `run` is fastest with, by the tuner's times or by
/// measuring on scratch operands. `what` and the shape tell apart what may be chosen differently.
int choose_fastest(
    GpuCommunicator& comm, std::string_view what, const DenseShape& shape, int64_t x_rows,
    int64_t out_rows, const std::vector<std::string>& names,
    const std::function<void(int, const Tensor& x, const Tensor& weight, const Tensor& out,
                             const Tensor* bias, const Scales* scales)>& run,
    Margin margin = {});
int choose_fastest(
    GpuCommunicator& comm, std::string_view what, const DenseShape& shape,
    const OperandExtents& operands, const std::vector<std::string>& names,
    const std::function<void(int, const Tensor& x, const Tensor& weight, const Tensor& out,
                             const Tensor* bias, const Scales* scales)>& run,
    Margin margin);

/// Collective: the way among `ways` that `run` is fastest at. Serial first: it wins ties.
Way choose_way(
    GpuCommunicator& comm, std::string_view op, const DenseShape& shape, int64_t x_rows,
    int64_t out_rows, const std::vector<Way>& ways,
    const std::function<void(Way, const Tensor& x, const Tensor& weight, const Tensor& out,
                             const Tensor* bias, const Scales* scales)>& run);
Way choose_way(
    GpuCommunicator& comm, std::string_view op, const DenseShape& shape,
    const OperandExtents& operands, const std::vector<Way>& ways,
    const std::function<void(Way, const Tensor& x, const Tensor& weight, const Tensor& out,
                             const Tensor* bias, const Scales* scales)>& run);

}  // namespace tandem::gpu
