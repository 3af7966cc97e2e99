// The messages of encoded_pairs.h without loss: as many bytes as a chunk needs, in slots that hold
// one as it is.
#pragma once

#include "collectives/cuda/encoded_pairs.h"
#include "comm/device/pair_fifos.cuh"

namespace tandem::gpu {

/// `scratch`: a slot for each of (size - 1) channels. bf16 or f32.
void launch_lossless_pairs(const PairFifos& fifos, DType dtype, const EncodedPairs& pairs,
                           std::byte* scratch, cudaStream_t stream);

}  // namespace tandem::gpu
