// Rotary embedding of one head's row, between activations (f32 or bf16) and scratch or a
// cache of keys.
#pragma once

#include "core/cpu/scalar.h"
#include "kernels/rope.h"

namespace tandem::cpu {

/// to = scale x rotate(from).
template <typename T, typename U>
void rotate(const T* from, const float* cos, const float* sin, int64_t half, float scale, U* to) {
#pragma omp simd
  for (int64_t i = 0; i < half; ++i) {
    const float low = to_f32(from[i]), high = to_f32(from[i + half]);
    to[i] = from_f32<U>(scale * (low * cos[i] - high * sin[i]));
    to[i + half] = from_f32<U>(scale * (high * cos[i] + low * sin[i]));
  }
}

/// to = scale x rotate^-1(from): the gradient of `rotate`.
template <typename T>
void rotate_back(const float* from, const float* cos, const float* sin, int64_t half, float scale,
                 T* to) {
#pragma omp simd
  for (int64_t i = 0; i < half; ++i) {
    const float low = from[i], high = from[i + half];
    to[i] = from_f32<T>(scale * (low * cos[i] + high * sin[i]));
    to[i + half] = from_f32<T>(scale * (high * cos[i] - low * sin[i]));
  }
}

}  // namespace tandem::cpu
