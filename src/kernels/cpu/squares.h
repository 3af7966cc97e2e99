// Sum of a row's squares, for norms.
#pragma once

#include <cstdint>

#include "core/cpu/scalar.h"

namespace tandem::cpu {

/// Not inlined: a loop over rows may be compiled as several, with other orders of a row's sum, and
/// the bits of a row would depend on its position.
template <typename T>
[[gnu::noipa]] float sum_of_squares(const T* x, int64_t n) {
  float squares = 0;
#pragma omp simd reduction(+ : squares)
  for (int64_t i = 0; i < n; ++i) squares += to_f32(x[i]) * to_f32(x[i]);
  return squares;
}

}  // namespace tandem::cpu
