// GPU global timer, read in stream order. Its resolution differs between GPUs and drivers.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace tandem::gpu {

/// Writes the time in nanoseconds to *at.
void launch_timestamp(uint64_t* at, cudaStream_t stream);
/// Writes the smallest nonzero difference of two readings in a short loop to *step; 0: it never
/// changed.
void launch_timer_step(uint64_t* step, cudaStream_t stream);

}  // namespace tandem::gpu
