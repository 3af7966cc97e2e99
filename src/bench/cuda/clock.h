// The GPU's global timer, read in stream order. Its step differs between GPUs and drivers.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace tandem::gpu {

/// *at becomes the time in nanoseconds.
void launch_stamp(uint64_t* at, cudaStream_t stream);
/// *step becomes the smallest difference of two readings in a short loop; 0: it never changed.
void launch_timer_step(uint64_t* step, cudaStream_t stream);

}  // namespace tandem::gpu
