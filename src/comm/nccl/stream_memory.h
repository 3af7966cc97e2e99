// Words written by a stream itself, without a kernel.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace tandem::gpu {

/// After everything enqueued before, *word = value, for this GPU and its peers to see.
void write_value(cudaStream_t stream, uint64_t* word, uint64_t value);

}  // namespace tandem::gpu
