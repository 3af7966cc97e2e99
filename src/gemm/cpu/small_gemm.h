// GEMM on cache-resident f32 blocks, used by attention. oneDNN's cost per call is too high for
// blocks this small (3.7, AVX-512: 1.8 times the time for 32 x 32 x 16, 1.1 for 64 x 64 x 64, equal
// from 128 up).
#pragma once

#include <cstdint>

namespace tandem::cpu {

constexpr int64_t kLanes = 16;
constexpr int64_t round_to_lanes(int64_t n) {
  return (n + kLanes - 1) / kLanes * kLanes;
}

/// c[m, n] (+)= a[m, k] x b[k, n]. Element (i, p) of a is at a[i * a_row + p * a_column]; b and c
/// are row-major with n a multiple of kLanes. Each element sums over p in order.
void small_gemm(int64_t m, int64_t n, int64_t k, const float* a, int64_t a_row, int64_t a_column,
                const float* b, int64_t b_row, float* c, int64_t c_row, bool accumulate);

/// to[j, i] = from[i, j] for i in [0, rows), j in [0, columns), both multiples of kLanes.
void transpose(const float* from, int64_t from_row, int64_t rows, int64_t columns, float* to,
               int64_t to_row);

}  // namespace tandem::cpu
