// Programmatic dependent launch: a kernel's blocks start while the last blocks of the kernel before
// it in the stream still run, and wait where they need its results. A kernel launched by
// launch_early must call wait_for_previous() before it reads or writes what earlier kernels of the
// stream do; every kernel should call let_next_start().
#pragma once

#include <utility>

#include "core/cuda/check.h"

namespace tandem::gpu {

/// Blocks until all kernels before this one have ended and their writes are visible. Does nothing
/// in a kernel launched in the ordinary way.
__device__ inline void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Lets the next kernel start once every block of this one has called this or has ended.
__device__ inline void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

/// Launches a kernel that may start before the preceding one has ended. `name`: of the error.
template <typename... Parameters, typename... Arguments>
void launch_early(const char* name, void (*kernel)(Parameters...), dim3 grid, unsigned threads,
                  size_t shared_bytes, cudaStream_t stream, Arguments&&... arguments) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...), name);
}

}  // namespace tandem::gpu
