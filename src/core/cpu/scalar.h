// Building blocks of the CPU kernels' inner loops. Branch-free once inlined, so that loops
// vectorise.
#pragma once

#include <bit>
#include <cstdint>
#include <string>

#include "tandem/dtype.h"
#include "tandem/error.h"

namespace tandem::cpu {

inline float to_f32(float value) {
  return value;
}
inline float to_f32(BFloat16 value) {
  return value.to_float();
}

template <typename T>
T from_f32(float value);
template <>
inline float from_f32<float>(float value) {
  return value;
}
template <>
inline BFloat16 from_f32<BFloat16>(float value) {
  return BFloat16::from_float(value);
}

/// e^x within 2 ulp for x in [-87.3, 88]; x is clamped to that range (e^-87.3 = 1.2e-38). NaN stays
/// NaN.
inline float fast_exp(float x) {
  constexpr float kMagic = 0x1.8p23f;  // adding it rounds to an integer in the low bits
  x = x < -87.3f ? -87.3f : x;
  x = x > 88.0f ? 88.0f : x;
  const float shifted = x * 1.44269504f + kMagic;
  const float n = shifted - kMagic;
  const float r = (x - n * 0x1.62e4p-1f) - n * 0x1.7f7d1cp-20f;
  float p = 1.3814540e-3f;
  p = p * r + 8.3687451e-3f;
  p = p * r + 4.1668391e-2f;
  p = p * r + 1.6666520e-1f;
  p = p * r + 4.9999993e-1f;
  const float e = (p * r) * r + r + 1.0f;
  const int32_t power = std::bit_cast<int32_t>(shifted) - std::bit_cast<int32_t>(kMagic);
  return e * std::bit_cast<float>((power + 127) << 23);
}

inline float sigmoid(float x) {
  return 1.0f / (1.0f + fast_exp(-x));
}

/// Calls body(T{}) with the element type of `dtype`: f32 or bf16. `what`: prefix of the error.
template <typename Body>
void with_type(DType dtype, const char* what, const Body& body) {
  switch (dtype) {
    case DType::f32:
      return body(float{});
    case DType::bf16:
      return body(BFloat16{});
    case DType::f16:
    case DType::i32:
    case DType::u8:
    case DType::e4m3:
      break;
  }
  throw InvalidArgument(std::string(what) + ": dtype " + std::string(name_of(dtype)) +
                        ": expected f32 or bf16");
}

}  // namespace tandem::cpu
