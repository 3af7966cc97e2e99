// Chunk sizes of encoded messages exchanged between pairs of GPU ranks.
#pragma once

#include <cstdint>

namespace tandem::gpu {

constexpr int64_t kChunkElements = 16384;
/// Uncompressed bytes of a `lossless` chunk; each chunk is coded independently.
constexpr int64_t kLosslessChunkBytes = 32 << 10;
/// Bytes for any chunk: a lossless one stored uncompressed, with its header. The largest other one
/// has 12 bits per element: codes of 8, groups of 16, scales and centers in f32.
constexpr int64_t kPairSlotBytes = kLosslessChunkBytes + 256;
static_assert(kPairSlotBytes >= kChunkElements * 12 / 8);

}  // namespace tandem::gpu
