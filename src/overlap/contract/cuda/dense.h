// Shared by the dense operators on GPUs: their GEMMs and calls, memory to measure on, and checks.
#pragma once

#include <utility>

#include "collectives/cuda/all_reduce.h"
#include "gemm/cuda/scaled_gemm.h"
#include "overlap/contract/cuda/roundings.h"
#include "tandem/collectives.h"
#include "tandem/norm.h"
#include "tandem/tensor.h"
#include "tune/candidate.h"
#include "tune/op_desc.h"

namespace tandem::gpu {

/// The operator's GEMM for `rows` of x.
GemmShape product_of(const OpDesc& desc, int64_t rows, bool with_bias);
/// Scale pointers for rows [first_row, end). `scales` must be valid, or null if unused.
ScalePointers pointers_of(const OpDesc& desc, const Scales* scales, int64_t first_row = 0);

/// Max bytes of a collective by kernels: so short that hiding it may cost more.
constexpr int64_t kMaxSerialKernelBytes = int64_t(16) << 20;
constexpr bool has_serial_kernels(int64_t bytes) {
  return bytes <= kMaxSerialKernelBytes;
}

/// A candidate's `run` that enqueues `step` as one collective call of this rank.
template <typename Step>
auto as_call(GpuCommunicator& comm, Step step) {
  return [&comm, step = std::move(step)](const Operands& o) {
    comm.check_device();
    const Enqueueing call(comm);
    comm.enqueue([&] { step(o); });
  };
}

struct Extent {
  DType dtype;
  int64_t rows, columns;
};
/// Extents of an operator's matrices.
struct OperandExtents {
  Extent x, weight, out;
};
/// As they are stored: weight_kn transposes the weight, or its gradient.
OperandExtents extents_of(const OpDesc& desc);

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
/// Throws InvalidArgument naming the operand unless all match `desc` and are contiguous, 16-byte
/// aligned memory of this GPU, as stored.
void check_operands(const GpuCommunicator& comm, const OpDesc& desc, const Operands& operands);

}  // namespace tandem::gpu
