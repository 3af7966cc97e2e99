// Transforms of a block's values before encoding: the Hadamard rotation (codec/tile.h), and spikes
// stored next to the codes (codec/spikes.h).
#pragma once

#include "codec/cuda/groups.cuh"

namespace tandem::gpu {

/// Rotates in place: H x / group.
__device__ inline void rotate(float (&x)[kLaneValues], int group, int lane) {
  const float scale = 1.0f / float(group);
#pragma unroll
  for (float& value : x) value = __fmul_rn(value, scale);
#pragma unroll
  for (int stride = 1; stride < kWireBlock; stride *= 2) {
    if (stride >= group) return;
    if (stride == 4 || stride == 8) {
      const float sign = lane & (stride / 4) ? -1.0f : 1.0f;
#pragma unroll
      for (float& value : x) {  // exact except for the sum
        value = __fmaf_rn(value, sign, __shfl_xor_sync(kAllLanes, value, stride / 4));
      }
      continue;
    }
    const int bit = stride < 4 ? stride : stride / 4;
#pragma unroll
    for (int e = 0; e < kLaneValues; ++e) {
      if (e & bit) continue;
      const float a = x[e], b = x[e + bit];
      x[e] = __fadd_rn(a, b);
      x[e + bit] = __fadd_rn(a, -b);
    }
  }
}

__device__ inline void rotate_back(float (&x)[kLaneValues], int group, float limit, int lane) {
  rotate(x, group, lane);
  const float size = float(group), maximum = limit / size;
#pragma unroll
  for (float& value : x) value = __fmul_rn(codec::within(value, maximum), size);
}

/// Spikes of the groups owned by a thread.
struct OwnedSpikes {
  uint32_t values[kOwned];  // min, max, as stored
  uint32_t positions[kOwned];
};

__device__ inline uint32_t spike_bits(float value, float limit) {
  const uint16_t bits = BFloat16::from_float(value).bits;
  const auto end = uint16_t(codec::bits_of(limit) >> 16);
  return (bits & 0x7fff) > end ? uint16_t((bits & 0x8000) | end) : bits;
}

/// First position of `value` in each group, times 2, plus 1 if negative there, which distinguishes
/// the equal values 0 and -0.
__device__ inline void first_positions(const WireParams& wire, int lane,
                                       const float (&x)[kLaneValues], const float (&value)[kOwned],
                                       uint32_t (&owned)[kOwned]) {
  float values[kVectors];
  spread_groups(wire, value, values);
  uint32_t positions[kVectors];
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    positions[j] = 0xffu;  // none
    const uint32_t first = 2 * uint32_t(in_group(wire, 16 * j) + 4 * lane);
#pragma unroll
    for (int i = 3; i >= 0; --i) {
      const uint32_t here = first + 2 * i + (codec::bits_of(x[4 * j + i]) >> 31);
      if (x[4 * j + i] == values[j]) positions[j] = here;
    }
  }
  const auto smaller = [](uint32_t a, uint32_t b) { return a < b ? a : b; };
  join_groups(wire, lane, positions, smaller, owned);
}

/// Overwrites the spikes with another element of the group. A group with NaN or an infinity is
/// unchanged.
__device__ inline void reserve_spikes(const WireParams& wire, int lane, float (&x)[kLaneValues],
                                      OwnedSpikes& spikes) {
  float minimum[kOwned], maximum[kOwned];
  join_values(wire, lane, x, min_or_nan, minimum);
  join_values(wire, lane, x, max_or_nan, maximum);
  uint32_t min_at[kOwned], max_at[kOwned];
  first_positions(wire, lane, x, minimum, min_at);
  first_positions(wire, lane, x, maximum, max_at);
  constexpr uint32_t kNone = 1u << 16;
  uint32_t marks[kOwned];
#pragma unroll
  for (int k = 0; k < kOwned; ++k) {
    const auto value_of = [](float value, uint32_t at) {
      return value == 0 ? codec::float_of<float>(at << 31) : value;
    };
    const bool known = max_magnitude(minimum[k], maximum[k]) <= wire.limit;
    spikes.values[k] = spike_bits(value_of(minimum[k], min_at[k]), wire.limit) |
                       spike_bits(value_of(maximum[k], max_at[k]), wire.limit) << 16;
    spikes.positions[k] = min_at[k] / 2 | max_at[k] / 2 << 8;
    if (!known) spikes.values[k] = 0x7fc07fc0u, spikes.positions[k] = 0;
    marks[k] = known ? spikes.positions[k] : kNone;
  }
  uint32_t positions[kVectors];
  spread_groups(wire, marks, positions);
  float instead = 0;
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    const int a = int(positions[j] & 0xff), b = int((positions[j] >> 8) & 0xff);
    if (in_group(wire, 16 * j) == 0) {
      const int other = a != 0 && b != 0 ? 0 : a != 1 && b != 1 ? 1 : 2;
      const float given = other == 0 ? x[4 * j] : other == 1 ? x[4 * j + 1] : x[4 * j + 2];
      instead = __shfl_sync(kAllLanes, given, 0, kQuad);
    }
    if (positions[j] & kNone) continue;
    const int first = in_group(wire, 16 * j) + 4 * lane;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (a - first == i || b - first == i) x[4 * j + i] = instead;
    }
  }
}

__device__ inline void restore_spikes(const WireParams& wire, int lane, const OwnedSpikes& spikes,
                                      float (&x)[kLaneValues]) {
  uint32_t positions[kVectors], values[kVectors];
  spread_groups(wire, spikes.positions, positions);
  spread_groups(wire, spikes.values, values);
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    const int first = in_group(wire, 16 * j) + 4 * lane;
    const int a = in_group(wire, int(positions[j] & 0xff)) - first;
    const int b = in_group(wire, int(positions[j] >> 8)) - first;
    const float minimum = codec::float_of<float>(values[j] << 16);
    const float maximum = codec::float_of<float>(values[j] & 0xffff0000u);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (a == i) x[4 * j + i] = minimum;
      if (b == i) x[4 * j + i] = maximum;
    }
  }
}

}  // namespace tandem::gpu
