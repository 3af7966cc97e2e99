// Kernels that run beside the one before them in a stream (programmatic dependent launch): the
// second begins once all blocks of the first run and have allowed it, so that what the first is to
// do for the second, it does; and no block of the second takes an SM that one of the first still
// needs. What the second reads beside that, was there before the first began.
#pragma once

#include <cuda_runtime.h>

#include <utility>

#include "core/cuda/beside.h"
#include "core/cuda/check.h"

namespace tandem::gpu {

/// In the first kernel, by all of its blocks. Nothing on GPUs before sm_90, where kernels follow
/// one another.
__device__ inline void allow_kernel_behind() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// At the end of the second one: it does not end before the first has, and so nothing behind it
/// in the stream begins earlier either. Nothing where it did not begin beside another.
__device__ inline void end_behind_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Launches a first kernel. `name`: in errors.
template <class... Parameters, class... Arguments>
void launch_blocks(void (*kernel)(Parameters...), const BesideBlocks& blocks, int threads,
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
