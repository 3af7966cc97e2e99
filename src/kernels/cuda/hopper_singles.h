// Attention of many rows outside chunks over pages by our own kernel for Hopper
// (kernels/cuda/sm90/single_attention.cu), where has_hopper_pages (hopper_chunks.h) holds.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/attention/paged_attention.h"

namespace tandem::gpu {

/// Whether the kernel takes so many rows outside chunks, in bf16: many that may have other bits
/// than few (PagedShape::batch_invariant). Throws DeviceError.
bool takes_hopper_singles(const PagedShape& shape, int64_t singles);

/// Counters of splits that runs of `shape` take.
int64_t single_counters(const PagedShape& shape);

/// Attends with the first `singles` rows, whose keys and values are in their pages. `sums`: f32,
/// scratch memory for max_splits(longest) splits of each head of each row. `counters`: device
/// memory with 0, before and after. Throws DeviceError.
void attend_hopper_singles(cudaStream_t stream, const PagedShape& shape, int64_t window,
                           const PagedRows& rows, int64_t singles, const PagedTensors& tensors,
                           float* sums, int* counters);

}  // namespace tandem::gpu
