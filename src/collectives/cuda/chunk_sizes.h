// How large the chunks are in which pairs of GPU ranks exchange encoded messages.
#pragma once

#include <cstdint>

namespace tandem::gpu {

constexpr int64_t kChunkElements = 16384;
/// Of `lossless`, each of whose chunks is coded by itself: of values as they are.
constexpr int64_t kLosslessChunkBytes = 32 << 10;

}  // namespace tandem::gpu
