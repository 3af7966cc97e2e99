// How large the chunks are in which pairs of GPU ranks exchange encoded messages.
#pragma once

#include <cstdint>

namespace tandem::gpu {

constexpr int64_t kChunkElements = 16384;
/// Of `lossless`, each of whose chunks is coded by itself: of values as they are.
constexpr int64_t kLosslessChunkBytes = 32 << 10;
/// Room for any chunk: a lossless one as it is, with its header. The largest other one has 12 bits
/// an element: codes of 8, groups of 16, scales and centers in f32.
constexpr int64_t kPairSlotBytes = kLosslessChunkBytes + 256;
static_assert(kPairSlotBytes >= kChunkElements * 12 / 8);

}  // namespace tandem::gpu
