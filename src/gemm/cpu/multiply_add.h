// sum + a * x with one rounding if the processor has FMA. Called explicitly, since compilers emit
// one instruction in some loops and two in others (GCC's avoid_256fma_chains), so that bits would
// depend on the loop.
#pragma once

#if defined(__FMA__)
#include <immintrin.h>
#endif

// Vectors are passed within this build only.
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

template <typename Vector>
inline Vector multiply_add(const Vector& a, const Vector& x, const Vector& sum) {
#if defined(__AVX512F__)
  if constexpr (sizeof(Vector) == 64) return _mm512_fmadd_ps(a, x, sum);
#endif
#if defined(__FMA__)
  if constexpr (sizeof(Vector) == 32) return _mm256_fmadd_ps(a, x, sum);
  if constexpr (sizeof(Vector) == 16) return _mm_fmadd_ps(a, x, sum);
#endif
  return sum + a * x;
}

}  // namespace tandem::cpu
