// Levels of a sparse message (codec/topk.h), computed by the same functions on host and device.
#pragma once

#include "codec/numbers.h"

namespace tandem::codec {

constexpr int kTopKIndexBits = 12;

/// Magnitudes that the codes of one chunk stand for: low + level * step.
struct TopKLevels {
  float low = 0, step = 0;
  float inverse = 0;  ///< 1 / step; 0 if all magnitudes are one level

  /// Levels of magnitudes from `smallest` to `largest`, given as bits; NaN if `largest` is not
  /// finite.
  static constexpr TopKLevels of(uint32_t smallest, uint32_t largest, int bits) {
    if (largest >= 0x7f800000u) return from_stored(kNaNBits >> 16);
    const float width = product(float_of<float>(largest) - float_of<float>(smallest),
                                1.0f / float(1 << (bits - 1)));
    const float middle = sum(float_of<float>(smallest), product(width, 0.5f));
    const uint32_t step = rounded(width) << 16;
    return from_stored((step >= kMinScale ? step : 0) | rounded(middle));
  }
  static constexpr TopKLevels from_stored(uint32_t stored) {
    const float step = float_of<float>(stored & 0xffff0000u);
    return {float_of<float>(stored << 16), step, step > 0 ? 1.0f / step : 0};
  }
  constexpr uint32_t stored() const { return bits_of(step) | bits_of(low) >> 16; }

  constexpr uint32_t code(float value, int bits) const {
    const auto last = float((1 << (bits - 1)) - 1);
    float t = product(sum(float_of<float>(bits_of(value) & 0x7fffffffu), -low), inverse);
    t = t > 0 ? t : 0;  // of NaN, too
    t = t < last ? t : last;
    const uint32_t level = bits_of(sum(t, 12582912.0f)) & 0xffu;  // 1.5 x 2^23 rounds to an integer
    return bits_of(value) >> 31 << (bits - 1) | level;
  }
  constexpr float value(uint32_t code, int bits) const {
    const uint32_t level = code & ((1u << (bits - 1)) - 1);
    const float magnitude = within(sum(low, product(float(level), step)), largest_of(DType::f32));
    return float_of<float>(bits_of(magnitude) | code >> (bits - 1) << 31);
  }

 private:
  /// bf16 nearest to a finite value >= 0, at most the largest.
  static constexpr uint32_t rounded(float value) {
    const uint32_t bits = bits_of(value);
    const uint32_t nearest = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return nearest < 0x7f7fu ? nearest : 0x7f7fu;
  }
};

}  // namespace tandem::codec
