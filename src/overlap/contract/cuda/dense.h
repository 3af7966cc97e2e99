// Shared by the dense operators on GPUs: checks, and the choice of an algorithm.
#pragma once

#include <functional>

#include "collectives/cuda/all_reduce.h"
#include "gemm/cuda/scaled_gemm.h"
#include "overlap/contract/cuda/algorithms.h"
#include "tandem/collectives.h"
#include "tandem/norm.h"
#include "tandem/tensor.h"
#include "tune/candidate.h"
#include "tune/cuda/measure.h"
#include "tune/margin.h"
#include "tune/op_desc.h"

namespace tandem::gpu {

/// The operator's GEMM for `rows` of x.
GemmShape product_of(const OpDesc& desc, int64_t rows, bool with_bias);
/// Scale pointers for rows [first_row, end). `scales` must be valid, or null if unused.
ScalePointers pointers_of(const OpDesc& desc, const Scales* scales, int64_t first_row = 0);

struct Extent {
  DType dtype;
  int64_t rows, columns;
};
/// Extents of an operator's matrices.
struct OperandExtents {
  Extent x, weight, out;
};
OperandExtents extents_of(const OpDesc& shape, int64_t x_rows, int64_t out_rows);

/// A matrix in memory it owns, initially zero.
struct Scratch {
  DeviceMemory memory;
  Tensor tensor;
  explicit Scratch(const Extent& e)
      : memory(size_t(e.rows * e.columns) * size_of(e.dtype)),
        tensor(memory.view(e.dtype, {e.rows, e.columns})) {}
};

/// Operands of an AddNorm, initially zero.
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

/// Whether this GPU can, and is allowed to, run the kernels compiled for sm_90a only.
bool has_hopper_kernels(const GpuCommunicator& comm);
/// As has_hopper_kernels, for kernels that store into the peers' memory unpaced: not on an emulated
/// link.
bool has_fused_kernels(const GpuCommunicator& comm);

/// Collective. Throws InvalidArgument for negative sizes, dtypes other than f32, bf16, f16 or e4m3,
/// rows that are not multiples of 16 bytes, or anything that e4m3 does not support; Mismatch if
/// ranks differ in what they must share.
void check_shape(GpuCommunicator& comm, std::string_view op, const OpDesc& shape, bool same_n,
                 bool same_k);
/// Throws InvalidArgument naming the operand of `op` unless `tensor` is this contiguous matrix on
/// this GPU.
void check_matrix(const GpuCommunicator& comm, std::string_view op, std::string_view operand,
                  const Tensor& tensor, DType dtype, int64_t rows, int64_t columns);
void check_operands(const GpuCommunicator& comm, std::string_view op, const OpDesc& shape,
                    int64_t x_rows, int64_t out_rows, const Tensor& x, const Tensor& weight,
                    const Tensor& out, const Tensor* bias, const Scales* scales);
/// Throws InvalidArgument unless it is given exactly if the shape has one, and satisfies AddNorm.
void check_add_norm_operands(const GpuCommunicator& comm, std::string_view op, const OpDesc& shape,
                             const AddNorm* add_norm);

/// Returns `variant`; throws InvalidArgument naming `candidate` unless it is one of its `variants`.
int known_variant(std::string_view op, Algorithm algorithm, int variant, int variants);

/// Collective: index of the name that `run` is fastest with, from the tuner's times or measured on
/// scratch operands. `what` and the shape form the key of the choice.
int choose_fastest(
    GpuCommunicator& comm, std::string_view what, const OpDesc& shape, int64_t x_rows,
    int64_t out_rows, const std::vector<std::string>& names,
    const std::function<void(int, const Tensor& x, const Tensor& weight, const Tensor& out,
                             const Tensor* bias, const Scales* scales)>& run,
    Margin margin = {});
int choose_fastest(
    GpuCommunicator& comm, std::string_view what, const OpDesc& shape,
    const OperandExtents& operands, const std::vector<std::string>& names,
    const std::function<void(int, const Tensor& x, const Tensor& weight, const Tensor& out,
                             const Tensor* bias, const Scales* scales)>& run,
    Margin margin);

/// Candidates that run `op` by each of `candidates`; it must outlive them. Operands as for the
/// operator's class.
template <typename Op>
std::vector<Candidate> candidates_of(Op& op, const std::vector<Algorithm>& algorithms) {
  std::vector<Candidate> all;
  for (const Algorithm algorithm : algorithms) {
    all.push_back(
        {.name = std::string(name_of(algorithm)),
         .form = is_serial(algorithm) ? Strategy::serial : Strategy::overlapped,
         .run = [&op, algorithm](const Operands& o) {
           if constexpr (requires {
                           op.run(algorithm, o.x, o.weight, o.out, o.bias, o.scales, o.add_norm);
                         }) {
             op.run(algorithm, o.x, o.weight, o.out, o.bias, o.scales, o.add_norm);
           } else if constexpr (requires {
                                  op.run(algorithm, o.x, o.weight, o.out, o.bias, o.scales);
                                }) {
             op.run(algorithm, o.x, o.weight, o.out, o.bias, o.scales);
           } else {
             op.run(algorithm, o.x, o.weight, o.out);
           }
         }});
  }
  return all;
}

/// Collective: the one of `candidates` that `run` is fastest with. Serial ones first: they win
/// ties.
Algorithm choose_algorithm(
    GpuCommunicator& comm, std::string_view op, const OpDesc& shape, int64_t x_rows,
    int64_t out_rows, const std::vector<Algorithm>& algorithms,
    const std::function<void(Algorithm, const Tensor& x, const Tensor& weight, const Tensor& out,
                             const Tensor* bias, const Scales* scales)>& run);
Algorithm choose_algorithm(
    GpuCommunicator& comm, std::string_view op, const OpDesc& shape, const OperandExtents& operands,
    const std::vector<Algorithm>& algorithms,
    const std::function<void(Algorithm, const Tensor& x, const Tensor& weight, const Tensor& out,
                             const Tensor* bias, const Scales* scales)>& run);

}  // namespace tandem::gpu
