// Spike reserving: the min and max element of a group are stored next to the codes, in bf16.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "codec/numbers.h"
#include "tandem/dtype.h"

namespace tandem::codec {

struct Spikes {
  uint16_t values[2];  ///< min, max
  uint8_t positions[2];
};

/// Spikes of a group with NaN or an infinity.
constexpr Spikes kNoSpikes{{0x7fc0, 0x7fc0}, {0, 0}};

/// Spikes at positions `minimum` and `maximum`; bf16 values that round past `limit` are clamped to
/// it.
constexpr Spikes spikes_at(const float* x, int minimum, int maximum, float limit) {
  const auto rounded = [limit](float value) {
    const uint16_t bits = BFloat16::from_float(value).bits;
    const auto end = uint16_t(bits_of(limit) >> 16);
    return (bits & 0x7fff) > end ? uint16_t((bits & 0x8000) | end) : bits;
  };
  return {{rounded(x[minimum]), rounded(x[maximum])}, {uint8_t(minimum), uint8_t(maximum)}};
}

/// Overwrites the spikes with another element of the group, so that they do not affect its scale.
constexpr void remove_spikes(const Spikes& spikes, float* x) {
  if (spikes.values[0] == 0x7fc0) return;
  int other = 0;
  while (other == spikes.positions[0] || other == spikes.positions[1]) ++other;
  for (const uint8_t position : spikes.positions) x[position] = x[other];
}

constexpr void restore_spikes(const Spikes& spikes, int group, float* x) {
  for (int i = 0; i < 2; ++i) {
    x[spikes.positions[i] % group] = BFloat16{spikes.values[i]}.to_float();
  }
}

inline void store_spikes(const Spikes& spikes, int64_t group, std::byte* values,
                         std::byte* positions) {
  std::memcpy(values + 4 * group, spikes.values, 4);
  std::memcpy(positions + 2 * group, spikes.positions, 2);
}

inline Spikes load_spikes(const std::byte* values, const std::byte* positions, int64_t group) {
  Spikes spikes;
  std::memcpy(spikes.values, values + 4 * group, 4);
  std::memcpy(spikes.positions, positions + 2 * group, 2);
  return spikes;
}

}  // namespace tandem::codec
