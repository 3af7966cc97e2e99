// Programmatic dependent launch: a kernel's blocks start while the last blocks of the kernel before
// it in the stream still run, and wait where they need its results. Every block of a kernel
// launched by launch_early must call wait_for_previous() before it reads or writes what earlier
// kernels of the stream do: then all of those have ended, since each waited for the one before it.
// It should call let_next_start() first: then a whole chain of kernels starts as soon as there is
// room, and a GEMM reads its weight while the small kernels before it run. No block of a kernel
// starts before all blocks of the one before it have, so that none waits for one without room.
#pragma once

#include <utility>

#include "core/cuda/check.h"
#include "core/cuda/load_module.cuh"

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

namespace {

/// Whether this source's kernels were compiled for GPUs that can start them early: PTX for others
/// has no wait. Asked once, for the first device.
inline bool can_start_early() {
  static const bool can = [] {
    cudaFuncAttributes attributes;
    check(cudaFuncGetAttributes(&attributes, module_marker), "early start");
    return attributes.ptxVersion >= 90;
  }();
  return can;
}

/// Launches a kernel that may start before the preceding one has ended, or else (`early` false)
/// after it, with clusters of `cluster` blocks. `name`: of the error.
template <typename... Parameters, typename... Arguments>
void launch_clusters_early(const char* name, void (*kernel)(Parameters...), dim3 grid,
                           unsigned cluster, dim3 threads, size_t shared_bytes, cudaStream_t stream,
                           bool early, Arguments&&... arguments) {
  cudaLaunchAttribute attributes[2] = {};
  unsigned count = 0;
  if (early && can_start_early()) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {cluster, 1, 1};
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  check(cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...), name);
}

/// As above, without clusters.
template <typename... Parameters, typename... Arguments>
void launch_early(const char* name, void (*kernel)(Parameters...), dim3 grid, dim3 threads,
                  size_t shared_bytes, cudaStream_t stream, bool early, Arguments&&... arguments) {
  launch_clusters_early(name, kernel, grid, 1, threads, shared_bytes, stream, early,
                        std::forward<Arguments>(arguments)...);
}

}  // namespace

}  // namespace tandem::gpu
