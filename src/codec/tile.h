// Tile: the number of blocks processed at a time, so that data passed between passes stays in the
// L1 cache. Groups never cross a tile.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "codec/lanes.h"

namespace tandem::codec {

constexpr int kTileBlocks = 16;
constexpr int kTile = kTileBlocks * kWireBlock;
constexpr int kMaxGroups = kTile / 16;

/// Per-group values passed between the passes over a tile, padded to whole vectors.
struct alignas(64) GroupNumbers {
  uint32_t scale[kMaxGroups];
  float inverse[kMaxGroups];  ///< 1 / scale; asymmetric formats: 1 / (2 scale)
  float maximum[kMaxGroups];  ///< max magnitude of codes
  float center[kMaxGroups];   ///< asymmetric formats
  /// Whether codes may exceed `maximum` and need clamping.
  bool clamps = true;
};

/// Splits [0, elements) into tiles and calls `with(first, count)` for each.
template <typename With>
inline void for_tiles(int64_t elements, const With& with) {
  for (int64_t first = 0; first < elements; first += kTile) {
    with(first, int(std::min<int64_t>(kTile, elements - first)));
  }
}

/// Converts `count` values to floats and repeats the last one up to the end of its block.
template <typename T>
inline void widen(const T* from, int count, float* to) {
  int i = 0;
  for (; i + kLanes <= count; i += kLanes) store_floats(to + i, load_floats(from + i));
  if (i < count) {
    T rest[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) rest[lane] = from[std::min(i + lane, count - 1)];
    store_floats(to + i, load_floats(rest));
    i += kLanes;
  }
  for (; i % kWireBlock != 0; ++i) to[i] = to[i - 1];
}

/// Inverse of `widen`, without the padding. Every NaN becomes kNaNBits.
template <typename T>
inline void narrow(const float* from, int count, T* to) {
  int i = 0;
  for (; i + kLanes <= count; i += kLanes) store_floats(to + i, canonical(load_floats(from + i)));
  if (i < count) {
    T rest[kLanes];
    store_floats(rest, canonical(load_floats(from + i)));
    for (int lane = 0; i + lane < count; ++lane) to[i + lane] = rest[lane];
  }
}

/// Lane i ^ stride in lane i.
template <int stride, int... lane>
inline FloatLanes exchanged(const FloatLanes& x, std::integer_sequence<int, lane...>) {
  return __builtin_shufflevector(x, x, (lane ^ stride)...);
}

/// x[i] + x[i + stride] in lane i, x[i] - x[i + stride] in lane i + stride.
template <int stride>
inline FloatLanes butterfly(const FloatLanes& x) {
  using LaneInts = int32_t __attribute__((vector_size(4 * kLanes)));
  const LaneInts is_second = (lane_numbers<LaneInts>() & stride) != 0;
  const FloatLanes other = exchanged<stride>(x, std::make_integer_sequence<int, kLanes>());
  return other + (is_second ? -x : x);
}

/// Rotates each group in place: H x / group, H the Hadamard matrix. Additions are in order of
/// stride 1, 2, 4, ..., so that every processor rounds alike.
inline void rotate(float* values, int count, int group) {
  const float reciprocal = 1.0f / float(group);
  for (int begin = 0; begin < count; begin += group) {
    FloatLanes x[kWireBlock / kLanes];
    const int vectors = group / kLanes;
    for (int j = 0; j < vectors; ++j) {
      x[j] = load_floats(values + begin + kLanes * j) * reciprocal;
      x[j] = butterfly<4>(butterfly<2>(butterfly<1>(x[j])));
      if constexpr (kLanes == 16) x[j] = butterfly<8>(x[j]);
    }
    for (int stride = 1; stride < vectors; stride *= 2) {
      for (int j = 0; j < vectors; ++j) {
        if (j & stride) continue;
        const FloatLanes a = x[j], b = x[j + stride];
        x[j] = a + b;
        x[j + stride] = a - b;
      }
    }
    for (int j = 0; j < vectors; ++j) store_floats(values + begin + kLanes * j, x[j]);
  }
}

/// Inverse of `rotate`, with results clamped to `limit`; intermediate values do not overflow.
inline void rotate_back(float* values, int count, int group, float limit) {
  rotate(values, count, group);
  const float scale = float(group), maximum = limit / scale;
  for (int i = 0; i < count; i += kLanes) {
    store_floats(values + i, canonical(within(load_floats(values + i), maximum) * scale));
  }
}

}  // namespace tandem::codec
