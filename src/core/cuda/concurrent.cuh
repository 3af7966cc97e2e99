// Kernels concurrent with their predecessor in a stream (programmatic dependent launch). The second
// starts once all blocks of the first run and have allowed it, so the first can always complete the
// work that the second waits for, and no block of the second takes an SM that the first still
// needs. All other inputs of the second must be ready before the first starts.
#pragma once

#include <cuda_runtime.h>

#include <utility>

#include "core/cuda/check.h"
#include "core/cuda/concurrent.h"

namespace tandem::gpu {

/// Called in the first kernel by all of its blocks. No-op before sm_90, where kernels are serial.
__device__ inline void allow_kernel_behind() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// Called at the end of the second kernel, which then does not end before the first has, so later
/// work in the stream does not start earlier either. No-op if it was not launched as a dependent.
__device__ inline void end_behind_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Launches a first kernel. `name`: prefix of errors.
template <class... Parameters, class... Arguments>
void launch_blocks(void (*kernel)(Parameters...), const ConcurrentBlocks& blocks, int threads,
                   const char* name, cudaStream_t stream, Arguments&&... arguments) {
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {2, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = unsigned(blocks.count);
  config.blockDim = unsigned(threads);
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = blocks.pairs && blocks.count % 2 == 0 ? 1 : 0;
  check(cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...), name);
}

}  // namespace tandem::gpu
