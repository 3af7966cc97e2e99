#include "kernels/cuda/add_norm.h"

#include "core/cuda/check.h"
#include "core/cuda/early_start.cuh"
#include "core/cuda/load_module.cuh"
#include "kernels/cuda/add_norm.cuh"

namespace tandem::gpu {
namespace {

__device__ void prefetch(const void* line) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
}

// One row per block. Inputs that the preceding kernel does not write are prefetched before the
// wait.
template <typename T>
__global__ void __launch_bounds__(kNormThreads) add_norm_kernel(const Vec<T>* sums, NormRows rows) {
  const int64_t first = int64_t(blockIdx.x) * rows.num_vecs;
  const auto* residual = static_cast<const Vec<T>*>(rows.residual);
  auto* hidden = static_cast<Vec<T>*>(rows.hidden);
  constexpr int kVecsPerLine = 8;
  for (int64_t i = int64_t(threadIdx.x) * kVecsPerLine; i < rows.num_vecs;
       i += kNormThreads * kVecsPerLine) {
    prefetch(residual + first + i);
    prefetch(static_cast<const Vec<T>*>(rows.gain) + i);
  }
  wait_for_previous();
  norm_row<T>(rows, blockIdx.x, [&](int64_t i) {
    const Vec<T> sum = sums[first + i], before = residual[first + i];
    Vec<T> after;
#pragma unroll
    for (int e = 0; e < Vec<T>::kElements; ++e) {
      after.at[e] = from_float<T>(to_float(sum.at[e]) + to_float(before.at[e]));
    }
    hidden[first + i] = after;
    return after;
  });
}

}  // namespace

void launch_add_norm(const Tensor& sum, const AddNorm& add_norm, const Tensor& out,
                     cudaStream_t stream) {
  if (out.elements() == 0) return;
  const bool known = with_float_type(out.dtype(), [&]<typename T>(T) {
    launch_early("add_norm_kernel", add_norm_kernel<T>, unsigned(out.dim(0)), kNormThreads, 0,
                 stream, true, sum.as<const Vec<T>>(), make_norm_rows(add_norm, out));
  });
  if (!known) throw InvalidArgument("add_norm: " + out.describe() + ": expected a float dtype");
}

}  // namespace tandem::gpu
