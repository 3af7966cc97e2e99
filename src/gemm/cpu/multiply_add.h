// sum + a * x, rounded once where the processor can: by name, since compilers take two instructions
// in some loops and one in others (GCC's avoid_256fma_chains), and then bits depend on the loop.
#pragma once

#if defined(__FMA__)
#include <immintrin.h>
#endif

// Vectors are passed inside this build alone.
#if defined(__GNUC__)
#pragma GCC diagnostic ignored "-Wpsabi"
#endif

namespace tandem::cpu {

template <typename Vector>
inline Vector multiply_add(float a, const Vector& x, const Vector& sum) {
#if defined(__AVX512F__)
  if constexpr (sizeof(Vector) == 64) return _mm512_fmadd_ps(_mm512_set1_ps(a), x, sum);
#endif
#if defined(__FMA__)
  if constexpr (sizeof(Vector) == 32) return _mm256_fmadd_ps(_mm256_set1_ps(a), x, sum);
  if constexpr (sizeof(Vector) == 16) return _mm_fmadd_ps(_mm_set1_ps(a), x, sum);
#endif
  return sum + a * x;
}

}  // namespace tandem::cpu
