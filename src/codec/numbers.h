// Arithmetic of the wire formats: scales and codes as functions of 32-bit words. Each is written
// once, as a template over one value (float, on host and device) and vectors (lanes.h), so that
// every processor produces the same bytes. Must not be contracted to fused multiply-adds or
// reordered.
#pragma once

#include <bit>
#include <cstdint>
#include <type_traits>

#include "codec/message.h"

// Vectors are passed only inside this build, so their ABI does not matter.
#if defined(__GNUC__)
#pragma GCC diagnostic ignored "-Wpsabi"
#endif

namespace tandem::codec {

/// Type of as many words as F has floats.
template <typename F>
struct WordsOf;
template <>
struct WordsOf<float> {
  using type = uint32_t;
};
template <typename F>
using Words = typename WordsOf<F>::type;

template <typename F>
constexpr Words<F> bits_of(F x) {
  return std::bit_cast<Words<F>>(x);
}
template <typename F>
constexpr F float_of(Words<F> bits) {
  return std::bit_cast<F>(bits);
}

/// Rounded product and sum, never fused with another operation.
template <typename F>
constexpr F product(F a, F b) {
#ifdef __CUDA_ARCH__
  if (!std::is_constant_evaluated()) return __fmul_rn(a, b);
#endif
  return a * b;
}
template <typename F>
constexpr F sum(F a, F b) {
#ifdef __CUDA_ARCH__
  if (!std::is_constant_evaluated()) return __fadd_rn(a, b);
#endif
  return a + b;
}

template <typename V>
constexpr V larger(V a, V b) {
  return a > b ? a : b;
}
/// Clamps to [-most, most]; NaN becomes `maximum`.
template <typename F>
constexpr F clamped(F t, F maximum) {
  t = t < maximum ? t : maximum;
  return t > -maximum ? t : -maximum;
}

constexpr uint32_t kNaNBits = 0x7fc00000;
constexpr uint32_t kMinScale = 0x00800000;  // 2^-126

/// Mantissas of 2^(1/4), 2^(1/2) and 2^(3/4).
constexpr uint32_t kRoots[] = {0x1837f0, 0x3504f3, 0x5744fd};
constexpr int kLog2Bias = 44;

/// Bits of the smallest f32 scale of `kind` that is >= `need` (>= 0) and >= 2^-126. If `need`
/// exceeds the max of `kind`: NaN for log2, the max for bf16, which is less than 2^-8 below.
template <ScaleKind kind, typename W>
constexpr W scale_at_least(W need) {
  if constexpr (kind == ScaleKind::f32) return larger(need, W{} + kMinScale);
  if constexpr (kind == ScaleKind::bf16) {
    const W rounded = larger((need + 0xffffu) & 0xffff0000u, W{} + kMinScale);
    const W maximum = W{} + 0x7f7f0000u;
    return rounded > maximum ? maximum : rounded;
  }
  if constexpr (kind == ScaleKind::e8m0) {
    return larger((need + 0x7fffffu) & 0x7f800000u, W{} + kMinScale);
  }
  if constexpr (kind == ScaleKind::log2) {
    const W minimum = larger(need, W{} + (uint32_t(127 - kLog2Bias) << 23));
    const W mantissa = minimum & 0x7fffffu, exponent = minimum & 0x7f800000u;
    const W rounded = mantissa > kRoots[2]   ? exponent + 0x800000u
                      : mantissa > kRoots[1] ? exponent + kRoots[2]
                      : mantissa > kRoots[0] ? exponent + kRoots[1]
                      : mantissa > 0u        ? exponent + kRoots[0]
                                             : exponent;
    const W maximum = W{} + ((uint32_t(127 + 19) << 23) + kRoots[1]);  // k = 254
    return rounded > maximum ? W{} + kNaNBits : rounded;
  }
}

/// Stored form of a scale in a message.
template <ScaleKind kind, typename W>
constexpr W stored_scale(W scale) {
  if constexpr (kind == ScaleKind::f32) return scale;
  if constexpr (kind == ScaleKind::bf16) return scale >> 16;
  if constexpr (kind == ScaleKind::e8m0) return scale >> 23;
  if constexpr (kind == ScaleKind::log2) {
    const W mantissa = scale & 0x7fffffu, exponent = (scale >> 23) - uint32_t(127 - kLog2Bias);
    const W quarter = mantissa == kRoots[2]   ? W{} + 3u
                      : mantissa == kRoots[1] ? W{} + 2u
                      : mantissa == kRoots[0] ? W{} + 1u
                                              : W{};
    return scale == kNaNBits ? W{} + 255u : exponent * 4u + quarter;
  }
}

/// Inverse of `stored_scale`, defined for every stored value.
template <ScaleKind kind, typename W>
constexpr W scale_of_stored(W stored) {
  if constexpr (kind == ScaleKind::f32) return stored;
  if constexpr (kind == ScaleKind::bf16) return stored << 16;
  if constexpr (kind == ScaleKind::e8m0) {
    const W scale = stored == 0u ? W{} + 0x400000u : stored << 23;
    return stored == 255u ? W{} + kNaNBits : scale;
  }
  if constexpr (kind == ScaleKind::log2) {
    const W quarter = stored & 3u, exponent = ((stored >> 2) + uint32_t(127 - kLog2Bias)) << 23;
    const W root = quarter == 3u   ? W{} + kRoots[2]
                   : quarter == 2u ? W{} + kRoots[1]
                   : quarter == 1u ? W{} + kRoots[0]
                                   : W{};
    return stored == 255u ? W{} + kNaNBits : exponent | root;
  }
}

/// Integers of kBits bits: code = value + 2^(kBits - 1); code 0 is unused.
template <int kBits>
struct Integer {
  static constexpr int bits = kBits;
  static constexpr int offset = 1 << (kBits - 1);
  static constexpr float maximum = float(offset - 1);
  static constexpr float half_step = 0.5f;  ///< max rounding error for |value| <= `maximum`

  /// Code of a value in [-most, most].
  template <typename F>
  static constexpr Words<F> code(F t) {
    const F at = sum(t, F{} + (12582912.0f + float(offset)));  // 1.5 x 2^23: rounds to an integer
    return bits_of(at) & ((1u << kBits) - 1u);
  }
  template <typename F>
  static constexpr F value(Words<F> code) {
    // 2^23 + code, exact.
    return float_of<F>(code | 0x4b000000u) - (8388608.0f + float(offset));
  }
};

/// Clamps x to [-limit, limit], keeping NaN: last step of decoding finite values of an asymmetric
/// format.
template <typename F>
constexpr F within(F x, float limit) {
  x = x > limit ? F{} + limit : x;
  return x < -limit ? F{} - limit : x;
}

/// Integer levels from min to max: value = (2 code - levels) / 2, in steps; code 0 is used.
template <int kBits>
struct Levels {
  static constexpr int bits = kBits;
  static constexpr int levels = (1 << kBits) - 1;
  static constexpr float maximum = float(levels) / 2;
  static constexpr float half_step = 0.5f;

  template <typename F>
  static constexpr Words<F> code(F t) {
    const F at = sum(sum(t, F{} + maximum), F{} + 12582912.0f);
    return bits_of(at) & ((1u << kBits) - 1u);
  }
  /// Twice the value, which is an integer.
  template <typename F>
  static constexpr F value(Words<F> code) {
    return float_of<F>(code * 2u | 0x4b000000u) - (8388608.0f + float(levels));
  }
};

/// Small float: a sign, kExponent exponent bits and kMantissa mantissa bits; no infinity and no
/// NaN.
template <int kExponent, int kMantissa, int kMaxCode>
struct SmallFloat {
  static constexpr int bits = 1 + kExponent + kMantissa;
  static constexpr int bias = (1 << (kExponent - 1)) - 1;
  static constexpr uint32_t sign = 1u << (bits - 1);
  static constexpr int shift = 23 - kMantissa;
  static constexpr float quantum = std::bit_cast<float>(uint32_t(128 - bias - kMantissa) << 23);
  static constexpr float min_normal = std::bit_cast<float>(uint32_t(128 - bias) << 23);

  template <typename F>
  static constexpr F value(Words<F> code) {
    const Words<F> magnitude = code & (sign - 1u);
    const Words<F> normal = (magnitude << shift) + (uint32_t(127 - bias) << 23);
    const Words<F> small =
        bits_of(product(float_of<F>(magnitude | 0x4b000000u) - 8388608.0f, F{} + quantum));
    const Words<F> all = magnitude < (1u << kMantissa) ? small : normal;
    return float_of<F>(all | ((code & sign) << (32 - bits)));
  }
  static constexpr float maximum = value<float>(uint32_t(kMaxCode));
  /// Half the distance between the two largest values.
  static constexpr float half_step = (maximum - value<float>(uint32_t(kMaxCode) - 1)) / 2;

  /// Code of t, rounded to nearest even.
  template <typename F>
  static constexpr Words<F> code(F t) {
    const Words<F> all = bits_of(t), magnitude = all & 0x7fffffffu;
    const Words<F> odd = (magnitude >> shift) & 1u;
    const Words<F> normal = ((magnitude + ((1u << (shift - 1)) - 1u) + odd) >> shift) -
                            (uint32_t(127 - bias) << kMantissa);
    // Adding 2^23 quanta rounds to a multiple of the quantum.
    constexpr float kAway = quantum * 8388608.0f;
    const Words<F> small =
        bits_of(sum(float_of<F>(magnitude), F{} + kAway)) - std::bit_cast<uint32_t>(kAway);
    const Words<F> rounded = magnitude < std::bit_cast<uint32_t>(min_normal) ? small : normal;
    return rounded | ((all >> (32 - bits)) & sign);
  }
};
using E4M3 = SmallFloat<4, 3, 0x7e>;
using E5M2 = SmallFloat<5, 2, 0x7b>;
using E2M3 = SmallFloat<2, 3, 0x1f>;
using E2M1 = SmallFloat<2, 1, 0x7>;

/// Largest value of Format whose product with `scale` is at most `limit`. Equals Format::most
/// unless the group reaches the end of its dtype's range: then the codes are limited, so that
/// finite values do not decode as infinite.
template <typename Format>
constexpr float max_within(float scale, float limit) {
  float maximum = Format::maximum;
  while (maximum > 0 && !(product(scale, maximum) <= limit)) {
    maximum = Format::template value<float>(Format::template code<float>(maximum) - 1);
  }
  return maximum;
}

/// Largest finite value of `dtype`.
constexpr float largest_of(DType dtype) {
  return dtype == DType::f16    ? 65504.0f
         : dtype == DType::bf16 ? std::bit_cast<float>(0x7f7f0000u)
                                : std::bit_cast<float>(0x7f7fffffu);
}

/// Scale and center of a group of an asymmetric format: value = center + (2 code - levels) scale.
struct LevelScale {
  uint32_t scale, stored_center;
  float center;
  float inverse;  ///< 1 / (2 scale)
};

/// Center from its stored form.
template <ScaleKind kind>
constexpr float center_of_stored(uint32_t stored, float scale, int levels) {
  if constexpr (kind == ScaleKind::log2) return product(float(levels - 2 * int(stored)), scale);
  return float_of<float>(kind == ScaleKind::bf16 ? stored << 16 : stored);
}

/// Scale and center for values in [least, most]. `beyond`: some are not finite or exceed `limit`.
template <ScaleKind kind>
constexpr LevelScale level_scale(float minimum, float maximum, bool beyond, int levels,
                                 float limit) {
  if (beyond) return {kNaNBits, 0, 0, 0};
  // -0 becomes 0: which of the two is a group's end depends on the lane order.
  minimum = sum(minimum, 0.0f);
  maximum = sum(maximum, 0.0f);
  LevelScale all{};
  // Zero is a level, and the center is stored as its index.
  if constexpr (kind == ScaleKind::log2) {
    minimum = minimum < 0 ? minimum : 0;
    maximum = maximum > 0 ? maximum : 0;
    const float half = product(maximum, 0.5f) - product(minimum, 0.5f);
    all.scale = scale_at_least<kind>(bits_of(product(half, 1.0f / float(levels))));
    if (all.scale == kNaNBits) return {kNaNBits, 0, 0, 0};
    all.inverse = 1.0f / (2 * float_of<float>(all.scale));
    const uint32_t zero = bits_of(sum(product(-minimum, all.inverse), 12582912.0f)) & 0x3ffu;
    all.stored_center = zero < uint32_t(levels) ? zero : uint32_t(levels);
  } else {
    const uint32_t middle = bits_of(sum(product(minimum, 0.5f), product(maximum, 0.5f)));
    if constexpr (kind == ScaleKind::bf16) {
      const uint32_t rounded = (middle + 0x7fffu + ((middle >> 16) & 1u)) >> 16;
      const uint32_t end = bits_of(limit) >> 16;
      all.stored_center = (rounded & 0x7fffu) > end ? (rounded & 0x8000u) | end : rounded;
    } else {
      all.stored_center = middle;
    }
    const float center = center_of_stored<kind>(all.stored_center, 0, levels);
    const float half = larger(maximum - center, center - minimum);
    all.scale = scale_at_least<kind>(bits_of(product(half, 1.0f / float(levels))));
    all.inverse = 1.0f / (2 * float_of<float>(all.scale));
  }
  all.center = center_of_stored<kind>(all.stored_center, float_of<float>(all.scale), levels);
  return all;
}

/// Calls `with` with an object of the codec's format type: Integer<8>, Levels<8>, E4M3, ...
template <typename With>
constexpr auto with_format(const Wire& wire, const With& with) {
  if (wire.asymmetric) {
    switch (code_bits(wire.codec)) {
      case 6:
        return with(Levels<6>());
      case 5:
        return with(Levels<5>());
      case 4:
        return with(Levels<4>());
      case 3:
        return with(Levels<3>());
      case 2:
        return with(Levels<2>());
    }
    return with(Levels<8>());
  }
  switch (wire.codec) {
    case Codec::int8:
      return with(Integer<8>());
    case Codec::int6:
      return with(Integer<6>());
    case Codec::int5:
      return with(Integer<5>());
    case Codec::int4:
      return with(Integer<4>());
    case Codec::int3:
      return with(Integer<3>());
    case Codec::int2:
      return with(Integer<2>());
    case Codec::e4m3:
    case Codec::mxfp8:
      return with(E4M3());
    case Codec::e5m2:
      return with(E5M2());
    case Codec::mxfp6:
      return with(E2M3());
    case Codec::mxfp4:
      return with(E2M1());
    case Codec::none:
    case Codec::lossless:
      break;
  }
  return with(Integer<8>());
}

}  // namespace tandem::codec
