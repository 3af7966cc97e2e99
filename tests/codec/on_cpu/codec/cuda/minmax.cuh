// CPU replacement of the header of this name, which uses GPU instructions.
#pragma once

#include <cmath>
#include <limits>

namespace tandem::gpu {

inline float min_or_nan(float a, float b) {
  return std::isnan(a) || std::isnan(b) ? std::numeric_limits<float>::quiet_NaN() : std::fmin(a, b);
}
inline float max_or_nan(float a, float b) {
  return std::isnan(a) || std::isnan(b) ? std::numeric_limits<float>::quiet_NaN() : std::fmax(a, b);
}

}  // namespace tandem::gpu
