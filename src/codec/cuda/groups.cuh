// Distribution of a block's groups over its four threads: owner threads compute a group's scale
// (several owners compute the same) and share it. Groups of 16: thread l owns groups 2 l and 2 l +
// 1; of 32: group l; of 64: group l / 2; of 128: all own the one group.
#pragma once

#include "codec/cuda/block_memory.cuh"
#include "codec/cuda/minmax.cuh"

namespace tandem::gpu {

constexpr int kOwned = 2;  // max groups per thread

__device__ inline int owned_groups(const WireParams& wire) {
  return wire.shift == 4 ? 2 : 1;
}
/// Index in the message of the thread's owned group `k`.
__device__ inline int64_t owned_group(const WireParams& wire, int64_t block, int lane, int k) {
  const int in_block = wire.shift == 4 ? 2 * lane + k : lane >> (wire.shift - 5);
  return (block << (7 - wire.shift)) + in_block;
}
/// Whether this thread stores the groups it owns.
__device__ inline bool stores_owned(const WireParams& wire, int lane) {
  return wire.shift <= 5 || (lane & ((1 << (wire.shift - 5)) - 1)) == 0;
}

/// Reduces the vectors' values with `join` over each group, to the group's owners.
template <typename V, typename Join>
__device__ void join_groups(const WireParams& wire, int lane, const V (&of)[kVectors],
                            const Join& join, V (&owned)[kOwned]) {
  const auto over = [&](V local, V given, int by) {
    return join(local, __shfl_xor_sync(kAllLanes, given, by));
  };
  const bool first = lane & 1, second = lane & 2;
  V four[4];
  if (wire.shift == 4) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      four[k] = over(second ? of[k + 4] : of[k], second ? of[k] : of[k + 4], 2);
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      owned[k] = over(first ? four[k + 2] : four[k], first ? four[k] : four[k + 2], 1);
    }
    return;
  }
#pragma unroll
  for (int k = 0; k < 4; ++k) four[k] = join(of[2 * k], of[2 * k + 1]);
  if (wire.shift == 5) {
    V two[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      two[k] = over(second ? four[k + 2] : four[k], second ? four[k] : four[k + 2], 2);
    }
    owned[0] = over(first ? two[1] : two[0], first ? two[0] : two[1], 1);
  } else {
    const V low = join(four[0], four[1]), high = join(four[2], four[3]);
    V local;
    if (wire.shift == 6) {
      local = over(second ? high : low, second ? low : high, 2);
    } else {
      const V all = join(low, high);
      local = over(all, all, 2);
    }
    owned[0] = over(local, local, 1);
  }
  owned[1] = owned[0];
}

/// Broadcasts each group's value from its owner to the group's vectors.
template <typename V>
__device__ void spread_groups(const WireParams& wire, const V (&owned)[kOwned], V (&of)[kVectors]) {
  const auto from = [&](V value, int lane) { return __shfl_sync(kAllLanes, value, lane, kQuad); };
  if (wire.shift == 4) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) of[j] = from(owned[j % 2], j / 2);
  } else if (wire.shift == 5) {
#pragma unroll
    for (int j = 0; j < kVectors; j += 2) of[j] = of[j + 1] = from(owned[0], j / 2);
  } else if (wire.shift == 6) {
#pragma unroll
    for (int j = 0; j < kVectors; j += 4) {
      of[j] = of[j + 1] = of[j + 2] = of[j + 3] = from(owned[0], j / 2);
    }
  } else {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) of[j] = owned[0];
  }
}

/// Max of magnitudes; NaN if either is.
__device__ inline float max_magnitude(float a, float b) {
  return max_or_nan(fabsf(a), fabsf(b));
}

/// Reduces each group's values with `join`, to its owners.
template <typename Join>
__device__ void join_values(const WireParams& wire, int lane, const float (&x)[kLaneValues],
                            const Join& join, float (&owned)[kOwned]) {
  float of[kVectors];
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    of[j] = join(join(x[4 * j], x[4 * j + 1]), join(x[4 * j + 2], x[4 * j + 3]));
  }
  join_groups(wire, lane, of, join, owned);
}

/// Dispatches a run-time scale kind to a template argument, for codec::scale_at_least and related
/// functions.
template <typename With>
__device__ auto with_kind(ScaleKind kind, const With& with) {
  switch (kind) {
    case ScaleKind::bf16:
      return with.template operator()<ScaleKind::bf16>();
    case ScaleKind::f32:
      return with.template operator()<ScaleKind::f32>();
    case ScaleKind::log2:
      return with.template operator()<ScaleKind::log2>();
    case ScaleKind::e8m0:
      break;
  }
  return with.template operator()<ScaleKind::e8m0>();
}

__device__ inline void store_number(ScaleKind kind, std::byte* numbers, int64_t index,
                                    uint32_t stored) {
  const int bytes = codec::scale_bytes(kind);
  if (bytes == 4) reinterpret_cast<uint32_t*>(numbers)[index] = stored;
  if (bytes == 2) reinterpret_cast<uint16_t*>(numbers)[index] = uint16_t(stored);
  if (bytes == 1) reinterpret_cast<uint8_t*>(numbers)[index] = uint8_t(stored);
}
__device__ inline uint32_t load_number(ScaleKind kind, const std::byte* numbers, int64_t index) {
  const int bytes = codec::scale_bytes(kind);
  if (bytes == 4) return __ldcg(reinterpret_cast<const uint32_t*>(numbers) + index);
  if (bytes == 2) return __ldcg(reinterpret_cast<const uint16_t*>(numbers) + index);
  return __ldcg(reinterpret_cast<const uint8_t*>(numbers) + index);
}

}  // namespace tandem::gpu
