// Words written and waited for by a stream itself, without a kernel.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace tandem::gpu {

/// After everything enqueued before, *word = value, for this GPU and its peers to see.
void write_value(cudaStream_t stream, uint64_t* word, uint64_t value);

/// A stream wait: everything enqueued after waits until *word is at least `value`; then *word is
/// reset to 0. Nobody else may wait for the same word meanwhile. Has no deadline: the word must be
/// written by work of this GPU that is enqueued before, on a stream that does not wait for this
/// one, and that ends. Where a caller captures both into a graph, they are branches of it, and must
/// have hardware queues of their own, as they do with run_gpus' CUDA_DEVICE_MAX_CONNECTIONS.
void wait_value_and_reset(cudaStream_t stream, unsigned* word, unsigned value);

}  // namespace tandem::gpu
