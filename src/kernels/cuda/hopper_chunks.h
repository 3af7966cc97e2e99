// Attention of prompts' chunks over pages by our own kernel for Hopper's tensor cores
// (kernels/cuda/sm90/chunk_attention.cu): all chunks of a run in one launch.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/attention/paged_attention.h"

namespace tandem::gpu {

/// Whether this and the kernel of hopper_singles.h run on this thread's GPU with bf16 heads of this
/// size. Throws DeviceError.
bool has_hopper_pages(int64_t head_dim);

/// Attends with the chunks' rows, whose keys and values are in their pages. `ticket`: device memory
/// with 0, before and after. Throws DeviceError.
void attend_hopper_chunks(cudaStream_t stream, const PagedShape& shape, int64_t window,
                          const PagedRows& rows, const PagedTensors& tensors, int* ticket);

}  // namespace tandem::gpu
