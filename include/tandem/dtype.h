// Element types. bf16, f16 and e4m3 are storage types: arithmetic is in f32, and conversion back
// rounds to nearest even, exact to the last bit. NaN stays NaN. Overflow becomes infinity; in e4m3,
// which has none, it becomes the largest value.
#pragma once

#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "tandem/export.h"

TANDEM_API_BEGIN
namespace tandem {

enum class DType : uint8_t { f32, bf16, f16, i32, u8, e4m3 };

constexpr size_t size_of(DType type) {
  switch (type) {
    case DType::f32:
    case DType::i32:
      return 4;
    case DType::bf16:
    case DType::f16:
      return 2;
    case DType::u8:
    case DType::e4m3:
      return 1;
  }
  return 0;
}

/// "f32", "bf16", "f16", "i32", "u8", "e4m3".
constexpr std::string_view name_of(DType type) {
  switch (type) {
    case DType::f32:
      return "f32";
    case DType::bf16:
      return "bf16";
    case DType::f16:
      return "f16";
    case DType::i32:
      return "i32";
    case DType::u8:
      return "u8";
    case DType::e4m3:
      return "e4m3";
  }
  return "?";
}

/// Inverse of `name_of`. Throws InvalidArgument, which lists the valid names.
DType parse_dtype(std::string_view name);

/// Upper half of an f32: 8 exponent bits, 7 mantissa bits.
struct BFloat16 {
  uint16_t bits = 0;

  static constexpr BFloat16 from_float(float value) {
    const uint32_t word = std::bit_cast<uint32_t>(value);
    if ((word & 0x7fffffffu) > 0x7f800000u) return {uint16_t((word >> 16) | 0x0040u)};
    return {uint16_t((word + 0x7fffu + ((word >> 16) & 1u)) >> 16)};
  }
  constexpr float to_float() const { return std::bit_cast<float>(uint32_t(bits) << 16); }
};

/// IEEE 754 binary16.
struct Float16 {
  uint16_t bits = 0;

  static constexpr Float16 from_float(float value) {
    const uint32_t word = std::bit_cast<uint32_t>(value);
    const uint32_t sign = (word >> 16) & 0x8000u;
    const uint32_t magnitude = word & 0x7fffffffu;
    if (magnitude > 0x7f800000u) {
      return {uint16_t(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu))};
    }
    if (magnitude >= 0x477ff000u) return {uint16_t(sign | 0x7c00u)};  // rounds past 65504
    uint32_t mantissa, shift, exponent;
    if (magnitude >= 0x38800000u) {  // normal in f16
      mantissa = magnitude & 0x7fffffu;
      exponent = (magnitude >> 23) - 112;
      shift = 13;
    } else {  // subnormal: align to 2^-24
      const uint32_t e = magnitude >> 23;
      if (e < 101) return {uint16_t(sign | (magnitude > 0x33000000u ? 1u : 0u))};
      mantissa = (magnitude & 0x7fffffu) | 0x800000u;
      exponent = 0;
      shift = 126 - e;
    }
    uint32_t half = (exponent << 10) + (mantissa >> shift);
    const uint32_t rest = mantissa & ((1u << shift) - 1), tie = 1u << (shift - 1);
    if (rest > tie || (rest == tie && (half & 1u))) ++half;
    return {uint16_t(sign | half)};
  }
  constexpr float to_float() const {
    const uint32_t sign = uint32_t(bits & 0x8000u) << 16;
    const uint32_t exponent = (bits >> 10) & 0x1fu, mantissa = bits & 0x3ffu;
    if (exponent == 0x1f) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
    if (exponent != 0) {
      return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
    }
    const float small = float(mantissa) * 0x1p-24f;
    return std::bit_cast<float>(std::bit_cast<uint32_t>(small) | sign);
  }
};

/// OCP FP8 format E4M3 ("E4M3FN"), 8 bits: 4 exponent bits with bias 7, 3 mantissa bits, range 2^-9
/// to 448; no infinity. Values beyond 448, including infinity, become 448; NaN becomes 0x7f.
struct Float8E4M3 {
  uint8_t bits = 0;

  static constexpr float kMax = 448;

  static constexpr Float8E4M3 from_float(float value) {
    const uint32_t word = std::bit_cast<uint32_t>(value);
    const uint32_t sign = (word >> 24) & 0x80u, magnitude = word & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return {0x7f};
    if (magnitude >= std::bit_cast<uint32_t>(kMax)) return {uint8_t(sign | 0x7eu)};
    if (magnitude >= 0x3c800000u) {  // 2^-6: normal
      const uint32_t rounded = magnitude + 0x7ffffu + ((magnitude >> 20) & 1u);
      return {uint8_t(sign | ((rounded >> 20) - (120u << 3)))};
    }
    const uint32_t e = magnitude >> 23;
    if (e < 117) return {uint8_t(sign)};  // below half of 2^-9
    const uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u, shift = 141 - e;
    uint32_t code = mantissa >> shift;
    const uint32_t rest = mantissa & ((1u << shift) - 1), tie = 1u << (shift - 1);
    if (rest > tie || (rest == tie && (code & 1u))) ++code;
    return {uint8_t(sign | code)};
  }
  constexpr float to_float() const {
    const uint32_t sign = uint32_t(bits & 0x80u) << 24;
    const uint32_t exponent = (bits >> 3) & 15u, mantissa = bits & 7u;
    if ((bits & 0x7fu) == 0x7fu) return std::bit_cast<float>(sign | 0x7fc00000u);
    if (exponent != 0) {
      return std::bit_cast<float>(sign | ((exponent + 120) << 23) | (mantissa << 20));
    }
    const float small = float(mantissa) * 0x1p-9f;
    return std::bit_cast<float>(std::bit_cast<uint32_t>(small) | sign);
  }
};

/// C++ types of tensor elements.
template <typename T>
concept TensorElement =
    std::same_as<T, float> || std::same_as<T, BFloat16> || std::same_as<T, Float16> ||
    std::same_as<T, int32_t> || std::same_as<T, uint8_t> || std::same_as<T, Float8E4M3>;

template <TensorElement T>
constexpr DType dtype_of() {
  if constexpr (std::same_as<T, float>) return DType::f32;
  if constexpr (std::same_as<T, BFloat16>) return DType::bf16;
  if constexpr (std::same_as<T, Float16>) return DType::f16;
  if constexpr (std::same_as<T, int32_t>) return DType::i32;
  if constexpr (std::same_as<T, uint8_t>) return DType::u8;
  if constexpr (std::same_as<T, Float8E4M3>) return DType::e4m3;
}

}  // namespace tandem
TANDEM_API_END
