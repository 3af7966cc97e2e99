// The messages of encoded_pairs.h without loss: as many bytes as a chunk needs, in slots that hold
// one as it is.
#pragma once

#include "collectives/cuda/encoded_pairs.h"
#include "comm/device/pair_fifos.cuh"

namespace tandem::gpu {

/// `blocks`: those that exchange, two for each peer and channel, and those that copy what the rank
/// sends itself. bf16 or f32.
void launch_lossless_pairs(const PairFifos& fifos, DType dtype, const EncodedPairs& pairs,
                           unsigned blocks, cudaStream_t stream);

}  // namespace tandem::gpu
