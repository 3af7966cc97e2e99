// Words that a stream writes and waits for without a kernel.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace tandem::gpu {

/// Sets *word = value after everything enqueued before, visible to this GPU and its peers.
void write_value(cudaStream_t stream, uint64_t* word, uint64_t value);

/// Stream wait: work enqueued after it waits until *word is at least `value`; then *word is reset
/// to 0. There must be no other waiter for the word meanwhile. Has no deadline: the word must be
/// written by work of this GPU that is enqueued before, on a stream that does not wait for this
/// one, and that ends. If a caller captures both into a graph, they are branches of it and must
/// have separate hardware queues, as run_gpus' CUDA_DEVICE_MAX_CONNECTIONS ensures.
void wait_value_and_reset(cudaStream_t stream, unsigned* word, unsigned value);

}  // namespace tandem::gpu
