// The memory behind kernels' stacks.
#pragma once

#include <cuda_runtime_api.h>

namespace tandem::gpu {

/// The first launch of a kernel that needs a larger stack than all before it waits for every kernel
/// of the GPU. After this call no kernel with up to 1 KiB a thread does, on streams of the place
/// (device or green context) that `stream` is of. Blocks.
void grow_stack(cudaStream_t stream);

}  // namespace tandem::gpu
