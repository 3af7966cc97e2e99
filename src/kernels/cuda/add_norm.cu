#include "kernels/cuda/add_norm.h"

#include "core/cuda/check.h"
#include "core/cuda/load_module.cuh"
#include "kernels/cuda/add_norm.cuh"

namespace tandem::gpu {
namespace {

__device__ void prefetch(const void* line) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
}

// Waits for the end of the preceding kernel, if this one was launched before it ended.
__device__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
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
  wait_for_previous_kernel();
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

// True if the kernel was compiled for GPUs that support early launch: PTX for others has no wait.
template <typename Kernel>
bool waits_itself(Kernel* kernel) {
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, kernel), "add_norm_kernel");
  return attributes.ptxVersion >= 90;
}

}  // namespace

void launch_add_norm(const Tensor& sum, const AddNorm& add_norm, const Tensor& out,
                     cudaStream_t stream) {
  if (out.elements() == 0) return;
  const bool known = with_float_type(out.dtype(), [&]<typename T>(T) {
    static const bool waits = waits_itself(add_norm_kernel<T>);
    cudaLaunchAttribute early{};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(unsigned(out.dim(0)));
    config.blockDim = dim3(kNormThreads);
    config.stream = stream;
    config.attrs = &early;
    config.numAttrs = waits;
    check(cudaLaunchKernelEx(&config, add_norm_kernel<T>, sum.as<const Vec<T>>(),
                             make_norm_rows(add_norm, out)),
          "add_norm_kernel");
  });
  if (!known) throw InvalidArgument("add_norm: " + out.describe() + ": expected a float dtype");
}

}  // namespace tandem::gpu
