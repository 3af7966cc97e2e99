// Range of the user's memory in 16-byte vectors.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

namespace tandem::gpu {

/// kAligned: whole 16-byte aligned vectors; otherwise accessed byte by byte, and the last vector
/// may be partial.
template <bool kAligned>
struct VectorRange {
  std::byte* at;
  int64_t bytes;

  __device__ int vecs() const { return int((bytes + 15) / 16); }
  __device__ uint4 load(int vec) const {
    const std::byte* from = at + int64_t(vec) * 16;
    if constexpr (kAligned) return *reinterpret_cast<const uint4*>(from);
    uint4 words{};
    for (int i = 0; i < 16 && i < bytes - int64_t(vec) * 16; ++i) {
      reinterpret_cast<std::byte*>(&words)[i] = from[i];
    }
    return words;
  }
  __device__ void store(int vec, const uint4& words) const {
    std::byte* to = at + int64_t(vec) * 16;
    if constexpr (kAligned) {
      *reinterpret_cast<uint4*>(to) = words;
    } else {
      for (int i = 0; i < 16 && i < bytes - int64_t(vec) * 16; ++i) {
        to[i] = reinterpret_cast<const std::byte*>(&words)[i];
      }
    }
  }
};

template <bool kAligned>
__device__ VectorRange<kAligned> vector_range(const std::byte* at, int64_t bytes) {
  return {const_cast<std::byte*>(at), bytes};
}

}  // namespace tandem::gpu
