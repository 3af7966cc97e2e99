// Soft caps of scores and logits: cap x tanh(x / cap), arXiv 2408.00118, 2.
#pragma once

#include <cstdint>

#include "kernels/cpu/fast_tanh.h"

namespace tandem::cpu {

/// Replaces n elements by their capped ones.
inline void cap(float* x, int64_t n, float cap) {
  const float inverse = 1 / cap;
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) x[i] = cap * fast_tanh(x[i] * inverse);
}

/// Derivative of a capped element.
inline float cap_derivative(float capped, float inverse_cap) {
  const float t = capped * inverse_cap;
  return (1 - t) * (1 + t);
}

}  // namespace tandem::cpu
