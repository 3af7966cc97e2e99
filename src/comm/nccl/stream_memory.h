// Words written and waited for by a stream itself, without a kernel.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace tandem::gpu {

/// After everything enqueued before, *word = value, for this GPU and its peers to see.
void write_value(cudaStream_t stream, uint64_t* word, uint64_t value);

/// Everything enqueued after waits until *word is at least `value`, and sets it back to 0; nobody
/// else may wait for the same word meanwhile. Has no deadline: the word must be written by work of
/// this GPU that is enqueued before, on a stream that does not wait for this one, and that ends.
/// Where a caller captures both into a graph, they are branches of it, and must have hardware
/// queues of their own, as they do with run_gpus' CUDA_DEVICE_MAX_CONNECTIONS.
void take_value(cudaStream_t stream, unsigned* word, unsigned value);

}  // namespace tandem::gpu
