// Attention of few rows outside chunks over pages by our own kernel for Hopper
// (kernels/cuda/sm90/few_attention.cu), where has_hopper_pages (hopper_chunks.h) holds.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/attention/paged_attention.h"

namespace tandem::gpu {

/// Whether the kernel takes the first `singles` rows, which are outside chunks, in bf16. With
/// PagedShape::batch_invariant that depends on the shape and the window only. Throws DeviceError.
bool takes_hopper_few(const PagedShape& shape, int64_t window, const PagedRows& rows,
                      int64_t singles);

/// Attends with these rows. With PagedRows::distinct_sequences it rotates and writes their keys and
/// writes their values; else q is rotated, and keys and values are in their pages. Throws
/// DeviceError.
void attend_hopper_few(cudaStream_t stream, const PagedShape& shape, const RopeTable& rope,
                       int64_t window, const PagedRows& rows, int64_t singles,
                       const PagedTensors& tensors);

}  // namespace tandem::gpu
