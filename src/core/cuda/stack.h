// Device memory of kernel stacks.
#pragma once

#include <cuda_runtime_api.h>

namespace tandem::gpu {

/// Grows the stack memory so that no kernel with up to 1 KiB a thread has to, on streams of the
/// context (device or green context) of `stream`. Otherwise the first launch of a kernel that needs
/// a larger stack than all before it waits for every kernel on the GPU. Blocks.
void grow_stack(cudaStream_t stream);

}  // namespace tandem::gpu
