// Passes over a tile's groups: value ranges, then scales.
#pragma once

#include <cstddef>

#include "codec/spikes.h"
#include "codec/tile.h"

namespace tandem::codec {

/// Stores each group's absmax, as bits, in `numbers.scale`.
inline void measure_magnitudes(const float* x, int groups, int group, GroupNumbers& numbers) {
  for (int g = 0; g < groups; ++g, x += group) {
    WordLanes maximum = bits_of(load_floats(x)) & 0x7fffffffu;
    for (int i = kLanes; i < group; i += kLanes) {
      maximum = larger(maximum, bits_of(load_floats(x + i)) & 0x7fffffffu);
    }
    numbers.scale[g] = largest_lane(maximum);
  }
}

/// First min and first max element of a group.
inline Spikes find_spikes(const float* x, int group, float limit) {
  FloatLanes minimum = load_floats(x), maximum = minimum;
  WordLanes magnitude{};
  for (int i = 0; i < group; i += kLanes) {
    const FloatLanes values = load_floats(x + i);
    magnitude = larger(magnitude, bits_of(values) & 0x7fffffffu);
    minimum = kSmaller(values, minimum);
    maximum = kLarger(values, maximum);
  }
  if (largest_lane(magnitude) > bits_of(limit)) return kNoSpikes;
  const FloatLanes smallest = FloatLanes{} + smallest_lane(minimum);
  const FloatLanes largest = FloatLanes{} + largest_lane(maximum);
  WordLanes first_min = WordLanes{} + uint32_t(group), first_max = first_min;
  for (int i = group - kLanes; i >= 0; i -= kLanes) {
    const FloatLanes values = load_floats(x + i);
    const WordLanes position = lane_numbers<WordLanes>() + uint32_t(i);
    first_min = values == smallest ? position : first_min;
    first_max = values == largest ? position : first_max;
  }
  return spikes_at(x, int(smallest_lane(first_min)), int(smallest_lane(first_max)), limit);
}

template <ScaleKind kind, typename Stored>
inline void store_scales(const GroupNumbers& numbers, int groups, std::byte* to) {
  for (int g = 0; g < groups; ++g) {
    const auto stored = Stored(stored_scale<kind>(numbers.scale[g]));
    std::memcpy(to + sizeof(Stored) * size_t(g), &stored, sizeof stored);
  }
}

template <typename Format, ScaleKind kind>
inline void choose_scales(int groups, float limit, GroupNumbers& numbers) {
  numbers.clamps = false;
  for (int g = 0; g < groups; g += kLanes) {
    const auto magnitude = load<WordLanes>(&numbers.scale[g]);
    const FloatLanes need =
        product(float_of<FloatLanes>(magnitude), FloatLanes{} + 1.0f / Format::maximum);
    const WordLanes minimum = scale_at_least<kind>(bits_of(need));
    const WordLanes scale = magnitude > bits_of(limit) ? WordLanes{} + kNaNBits : minimum;
    const auto is_known = scale != kNaNBits;
    const WordLanes inverse = bits_of(1.0f / float_of<FloatLanes>(scale));
    store(&numbers.scale[g], scale);
    store(&numbers.inverse[g], is_known ? inverse : WordLanes{});
    store(&numbers.maximum[g], FloatLanes{} + Format::maximum);
    const WordLanes reach =
        bits_of(product(float_of<FloatLanes>(scale), FloatLanes{} + Format::maximum));
    if (largest_lane(reach) <= bits_of(limit)) continue;
    numbers.clamps = true;
    for (int lane = g; lane < g + kLanes; ++lane) {
      if (numbers.scale[lane] == kNaNBits) continue;
      numbers.maximum[lane] = max_within<Format>(float_of<float>(numbers.scale[lane]), limit);
    }
  }
}

/// Replaces the absmax in `numbers.scale` by scales and stores the first `groups` of them to `to`.
template <typename Format>
inline void make_scales(ScaleKind kind, int all_groups, int groups, float limit,
                        GroupNumbers& numbers, std::byte* to) {
  for (int g = all_groups; g % kLanes != 0; ++g) numbers.scale[g] = 0;
  switch (kind) {
    case ScaleKind::bf16:
      choose_scales<Format, ScaleKind::bf16>(all_groups, limit, numbers);
      return store_scales<ScaleKind::bf16, uint16_t>(numbers, groups, to);
    case ScaleKind::f32:
      choose_scales<Format, ScaleKind::f32>(all_groups, limit, numbers);
      return store_scales<ScaleKind::f32, uint32_t>(numbers, groups, to);
    case ScaleKind::log2:
      choose_scales<Format, ScaleKind::log2>(all_groups, limit, numbers);
      return store_scales<ScaleKind::log2, uint8_t>(numbers, groups, to);
    case ScaleKind::e8m0:
      choose_scales<Format, ScaleKind::e8m0>(all_groups, limit, numbers);
      return store_scales<ScaleKind::e8m0, uint8_t>(numbers, groups, to);
  }
}

/// Stores each group's min in `numbers.center`, its max in `numbers.maximum` and its absmax, as
/// bits, in `numbers.scale`.
inline void measure_ranges(const float* x, int groups, int group, GroupNumbers& numbers) {
  measure_magnitudes(x, groups, group, numbers);
  for (int g = 0; g < groups; ++g, x += group) {
    FloatLanes minimum = load_floats(x), maximum = minimum;
    for (int i = kLanes; i < group; i += kLanes) {
      const FloatLanes values = load_floats(x + i);
      minimum = values < minimum ? values : minimum;
      maximum = larger(values, maximum);
    }
    numbers.center[g] = smallest_lane(minimum);
    numbers.maximum[g] = largest_lane(maximum);
  }
}

template <typename Stored>
inline void store_centers(const uint32_t* centers, int groups, std::byte* to) {
  for (int g = 0; g < groups; ++g) {
    const auto stored = Stored(centers[g]);
    std::memcpy(to + sizeof(Stored) * size_t(g), &stored, sizeof stored);
  }
}

/// Replaces the ranges by scales and centers and stores the first `groups` of them.
template <ScaleKind kind, typename Stored>
inline void choose_levels(int levels, int all_groups, int groups, float limit,
                          GroupNumbers& numbers, std::byte* scales, std::byte* centers) {
  uint32_t stored[kMaxGroups];
  numbers.clamps = kind == ScaleKind::log2;
  for (int g = 0; g < all_groups; ++g) {
    const bool beyond = numbers.scale[g] > bits_of(limit);
    const LevelScale all =
        level_scale<kind>(numbers.center[g], numbers.maximum[g], beyond, levels, limit);
    numbers.clamps = numbers.clamps || beyond;
    numbers.scale[g] = all.scale;
    numbers.inverse[g] = all.inverse;
    numbers.maximum[g] = float(levels) / 2;
    numbers.center[g] = all.center;
    stored[g] = all.stored_center;
  }
  store_scales<kind, Stored>(numbers, groups, scales);
  store_centers<Stored>(stored, groups, centers);
}

inline void make_levels(ScaleKind kind, int levels, int all_groups, int groups, float limit,
                        GroupNumbers& numbers, std::byte* scales, std::byte* centers) {
  switch (kind) {
    case ScaleKind::bf16:
      return choose_levels<ScaleKind::bf16, uint16_t>(levels, all_groups, groups, limit, numbers,
                                                      scales, centers);
    case ScaleKind::f32:
      return choose_levels<ScaleKind::f32, uint32_t>(levels, all_groups, groups, limit, numbers,
                                                     scales, centers);
    case ScaleKind::log2:
    case ScaleKind::e8m0:
      return choose_levels<ScaleKind::log2, uint8_t>(levels, all_groups, groups, limit, numbers,
                                                     scales, centers);
  }
}

}  // namespace tandem::codec
