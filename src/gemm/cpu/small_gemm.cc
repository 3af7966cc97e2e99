#include "gemm/cpu/small_gemm.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <utility>

#include "gemm/cpu/multiply_add.h"

namespace tandem::cpu {
namespace {

// A tile's accumulators, a row of b and one element of a fit in the registers; vectors wider than
// the processor's would be spilled at every step.
#if defined(__AVX512F__)
constexpr int kVectorBytes = 64, kTileVectors = 4;  // 24 accumulators of 32 registers
#elif defined(__AVX__)
constexpr int kVectorBytes = 32, kTileVectors = 2;  // 12 of 16
#elif defined(__aarch64__)
constexpr int kVectorBytes = 16, kTileVectors = 4;  // 24 of 32
#else
constexpr int kVectorBytes = 16, kTileVectors = 2;  // 12 of 16
#endif
constexpr int kTileRows = 6;
constexpr int64_t kVectorLanes = kVectorBytes / int64_t(sizeof(float));
using Vector = float __attribute__((vector_size(kVectorBytes)));
// Vector as stored in memory. Accumulators have another type: GCC would store this one at every
// step.
using Stored = float __attribute__((vector_size(kVectorBytes), aligned(4), may_alias));
static_assert(kLanes % kVectorLanes == 0, "n is a multiple of a vector");

struct Operands {
  const float* a;
  int64_t a_row, a_column;
  const float* b;
  int64_t b_row;
  float* c;
  int64_t c_row;
};

template <int Rows, int Vectors>
void tile(int64_t k, const Operands& o, bool accumulate) {
  Vector sums[Rows][Vectors];
#pragma GCC unroll 8
  for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < Vectors; ++j) {
      sums[i][j] = accumulate
                       ? *reinterpret_cast<const Stored*>(o.c + i * o.c_row + j * kVectorLanes)
                       : Vector{};
    }
  }
  const float* a = o.a;
  const float* b = o.b;
  for (int64_t p = 0; p < k; ++p, a += o.a_column, b += o.b_row) {
    Vector columns[Vectors];
#pragma GCC unroll 4
    for (int j = 0; j < Vectors; ++j) {
      columns[j] = *reinterpret_cast<const Stored*>(b + j * kVectorLanes);
    }
#pragma GCC unroll 8
    for (int i = 0; i < Rows; ++i) {
      const float scalar = a[i * o.a_row];
#pragma GCC unroll 4
      for (int j = 0; j < Vectors; ++j) {
        sums[i][j] = multiply_add<Vector>(scalar, columns[j], sums[i][j]);
      }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < Vectors; ++j) {
      *reinterpret_cast<Stored*>(o.c + i * o.c_row + j * kVectorLanes) = sums[i][j];
    }
  }
}

using Tile = void (*)(int64_t, const Operands&, bool);

/// kTiles[vectors - 1][rows - 1].
template <int Vectors, int... Row>
constexpr std::array<Tile, kTileRows> tiles_of(std::integer_sequence<int, Row...>) {
  return {tile<Row + 1, Vectors>...};
}
template <int... Vector>
constexpr std::array<std::array<Tile, kTileRows>, kTileVectors> all_tiles(
    std::integer_sequence<int, Vector...>) {
  return {tiles_of<Vector + 1>(std::make_integer_sequence<int, kTileRows>{})...};
}
constexpr auto kTiles = all_tiles(std::make_integer_sequence<int, kTileVectors>{});

}  // namespace

void small_gemm(int64_t m, int64_t n, int64_t k, const float* a, int64_t a_row, int64_t a_column,
                const float* b, int64_t b_row, float* c, int64_t c_row, bool accumulate) {
  for (int64_t column = 0; column < n; column += kTileVectors * kVectorLanes) {
    const int64_t vectors = std::min<int64_t>(kTileVectors, (n - column) / kVectorLanes);
    for (int64_t row = 0, rows; row < m; row += rows) {
      // The last two tiles are balanced: a tile of few rows is bound by the latency of its
      // additions.
      const int64_t left = m - row;
      rows = left > kTileRows && left < 2 * kTileRows ? (left + 1) / 2
                                                      : std::min<int64_t>(kTileRows, left);
      kTiles[size_t(vectors - 1)][size_t(rows - 1)](
          k, {a + row * a_row, a_row, a_column, b + column, b_row, c + row * c_row + column, c_row},
          accumulate);
    }
  }
}

void transpose(const float* from, int64_t from_row, int64_t rows, int64_t columns, float* to,
               int64_t to_row) {
  for (int64_t row = 0; row < rows; row += kLanes) {
    for (int64_t column = 0; column < columns; ++column) {
      const float* source = from + row * from_row + column;
      float* target = to + column * to_row + row;
#pragma omp simd
      for (int64_t i = 0; i < kLanes; ++i) target[i] = source[i * from_row];
    }
  }
}

}  // namespace tandem::cpu
