// Lossless messages of encoded_pairs.h: as many bytes as a chunk needs, in slots that fit an
// uncompressed one.
#pragma once

#include "collectives/cuda/encoded_pairs.h"
#include "comm/device/pair_fifos.cuh"

namespace tandem::gpu {

/// `blocks`: exchanging blocks, two per peer and channel, plus those that copy this rank's rows to
/// itself. bf16 or f32.
void launch_lossless_pairs(const PairFifos& fifos, DType dtype, const EncodedPairs& pairs,
                           unsigned blocks, cudaStream_t stream);

}  // namespace tandem::gpu
