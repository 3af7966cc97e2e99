// Flushes the L2 cache of data that a call could find there, by reading: a cache full of dirty
// lines would be written back during the timed call, at the expense of its memory traffic.
#pragma once

#include "core/cuda/handles.h"

namespace tandem::gpu {

/// Reads all of `memory`, which must be several times the cache.
void launch_flush(const DeviceMemory& memory, cudaStream_t stream);

}  // namespace tandem::gpu
