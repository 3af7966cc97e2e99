// Error of a round trip through a wire format, compared with its documented bound.
#pragma once

#include <algorithm>
#include <cmath>
#include <concepts>
#include <span>
#include <vector>

#include "tandem/codec.h"
#include "tests/codec/values.h"

namespace tandem::test {

template <typename T>
T narrowed(float x) {
  if constexpr (std::same_as<T, float>)
    return x;
  else
    return T::from_float(x);
}
template <typename T>
float widened(T x) {
  if constexpr (std::same_as<T, float>)
    return x;
  else
    return x.to_float();
}

template <typename T>
std::vector<T> as(const std::vector<float>& values) {
  std::vector<T> all;
  for (const float x : values) {
    const float bounded = dtype_of<T>() == DType::f16 ? std::clamp(x, -65504.0f, 65504.0f) : x;
    all.push_back(narrowed<T>(bounded));
  }
  return all;
}

template <typename T>
std::vector<T> round_trip(const Wire& wire, std::vector<T> values) {
  const Tensor x = Tensor::of(std::span(values), {int64_t(values.size())});
  std::vector<std::byte> message(wire.bytes(x.elements(), x.dtype()), std::byte(0xa5));
  encode(wire, x, message);
  std::vector<T> decoded(values.size());
  decode(wire, message, Tensor::of(std::span(decoded), {x.elements()}));
  return decoded;
}

/// Relative error bound. FP8 codes are coarser relative to the group's largest magnitude `maximum`
/// if its scale is the minimum, `smallest`.
inline double relative_bound(const Wire& wire, double maximum, double smallest) {
  const double bound = wire.error_bound();
  if (wire.codec == Codec::e5m2 && maximum < 57344 * smallest) return std::max(bound, 0x1p-3);
  if (wire.codec == Codec::e4m3 && maximum < 448 * smallest) return std::max(bound, 0x1p-4);
  return bound;
}

/// Largest error relative to what `wire` and the rounding to T allow.
template <typename T>
double worst(const Wire& wire, const std::vector<T>& values, const std::vector<T>& decoded) {
  const double rounding = dtype_of<T>() == DType::f32    ? 0x1p-24
                          : dtype_of<T>() == DType::bf16 ? 0x1p-8
                                                         : 0x1p-11;
  const double subnormal = dtype_of<T>() == DType::f16 ? 0x1p-25 : 0;
  const double floor = wire.scale == ScaleKind::log2 ? 0x1p-44 : 0x1p-126;
  double ratio = 0;
  for (size_t begin = 0; begin < values.size(); begin += size_t(wire.group)) {
    const size_t end = std::min(values.size(), begin + size_t(wire.group));
    double maximum = 0;
    for (size_t i = begin; i < end; ++i)
      maximum = std::max(maximum, std::fabs(double(widened(values[i]))));
    // One step more if the wanted step is beyond the end of the dtype's range.
    const double limit = dtype_of<T>() == DType::f16 ? 65504 : 0x1.fcp127;
    const double steps = maximum > limit / 1.5 ? 3 : 1;
    const double bound = maximum * (steps * relative_bound(wire, maximum, floor) + rounding) +
                         floor * (wire.hadamard ? wire.group : 2) + subnormal;
    for (size_t i = begin; i < end; ++i) {
      const double error = std::fabs(double(widened(decoded[i])) - double(widened(values[i])));
      ratio = std::isnan(error) ? INFINITY : std::max(ratio, error / bound);
    }
  }
  return ratio;
}

}  // namespace tandem::test
