#include <cmath>
#include <cstring>
#include <numbers>

#include "core/cpu/parallel.h"
#include "kernels/cpu/kernels.h"
#include "kernels/dct.h"

namespace tandem::cpu {
namespace {

constexpr int kSide = kMaxDctTile;
constexpr int64_t kMinTiles = 4;  ///< per thread

/// A matrix in L1: rows of kSide, zero past its columns.
struct alignas(64) Tile {
  float at[kSide][kSide];
};

enum class Order : uint8_t { by_coefficient, by_value };

/// The cosines of a transform of `size`, whose rows are coefficients or values.
Tile make_basis(int size, Order order, float scale) {
  Tile basis{};
  for (int k = 0; k < size; ++k) {
    const double norm = std::sqrt((k > 0 ? 2.0 : 1.0) / size);
    for (int n = 0; n < size; ++n) {
      const double angle = std::numbers::pi * k * (2 * n + 1) / (2.0 * size);
      const auto value = float(norm * std::cos(angle) * double(scale));
      (order == Order::by_coefficient ? basis.at[k][n] : basis.at[n][k]) = value;
    }
  }
  return basis;
}

/// out = a x b for `rows` rows of `depth` products; kColumns: columns of b, a multiple of 16.
template <int kColumns>
void multiply(const Tile& a, int rows, int depth, const Tile& b, Tile& out) {
  constexpr int kRows = 4;
  for (int row = 0; row < rows; row += kRows) {
    float sums[kRows][kColumns] = {};
    for (int k = 0; k < depth; ++k) {
      for (int r = 0; r < kRows; ++r) {
        const float factor = a.at[row + r][k];
#pragma omp simd
        for (int c = 0; c < kColumns; ++c) sums[r][c] += factor * b.at[k][c];
      }
    }
    for (int r = 0; r < kRows; ++r) std::memcpy(out.at[row + r], sums[r], sizeof sums[r]);
  }
}

void multiply(const Tile& a, int rows, int depth, int columns, const Tile& b, Tile& out) {
  if (columns <= 16) return multiply<16>(a, rows, depth, b, out);
  if (columns <= 32) return multiply<32>(a, rows, depth, b, out);
  if (columns <= 48) return multiply<48>(a, rows, depth, b, out);
  return multiply<64>(a, rows, depth, b, out);
}

/// Calls with(tile, offset of its first element in the matrix) for each tile.
template <typename With>
void for_each_tile(const DctTiles& tiles, const With& with) {
  const int64_t across = tiles.columns / tiles.width;
  parallel_ranges(tiles.tiles(), kMinTiles, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      with(t, t / across * tiles.height * tiles.columns + t % across * tiles.width);
    }
  });
}

/// out = left x tile x right for each tile, which lies at `strides` in rows in memory.
struct Transform {
  const DctTiles& tiles;
  Tile left, right;

  void run(const float* from, int64_t from_stride, float* to, int64_t to_stride) const {
    Tile x{}, half;
    const size_t bytes = sizeof(float) * size_t(tiles.width);
    for (int r = 0; r < tiles.height; ++r) std::memcpy(x.at[r], from + r * from_stride, bytes);
    multiply(x, tiles.height, tiles.width, tiles.width, right, half);
    multiply(left, tiles.height, tiles.height, tiles.width, half, x);
    for (int r = 0; r < tiles.height; ++r) std::memcpy(to + r * to_stride, x.at[r], bytes);
  }
};

/// Copies the rows of a tile.
void copy_tile(const DctTiles& tiles, const float* from, int64_t from_stride, float* to,
               int64_t to_stride) {
  const size_t bytes = sizeof(float) * size_t(tiles.width);
  for (int r = 0; r < tiles.height; ++r) {
    std::memcpy(to + r * to_stride, from + r * from_stride, bytes);
  }
}

}  // namespace

void dct_forward(const DctTiles& tiles, float scale, const Tensor& x, const Tensor& coefficients) {
  const Transform transform{tiles, make_basis(tiles.height, Order::by_coefficient, scale),
                            make_basis(tiles.width, Order::by_value, 1)};
  for_each_tile(tiles, [&](int64_t tile, int64_t offset) {
    transform.run(x.as<const float>() + offset, tiles.columns,
                  coefficients.as<float>() + tile * tiles.elements(), tiles.width);
  });
}

void dct_inverse(const DctTiles& tiles, const Tensor& coefficients, const Tensor& x) {
  const Transform transform{tiles, make_basis(tiles.height, Order::by_value, 1),
                            make_basis(tiles.width, Order::by_coefficient, 1)};
  for_each_tile(tiles, [&](int64_t tile, int64_t offset) {
    transform.run(coefficients.as<const float>() + tile * tiles.elements(), tiles.width,
                  x.as<float>() + offset, tiles.columns);
  });
}

void to_tiles(const DctTiles& tiles, const Tensor& x, const Tensor& packed) {
  for_each_tile(tiles, [&](int64_t tile, int64_t offset) {
    copy_tile(tiles, x.as<const float>() + offset, tiles.columns,
              packed.as<float>() + tile * tiles.elements(), tiles.width);
  });
}

void from_tiles(const DctTiles& tiles, const Tensor& packed, const Tensor& x) {
  for_each_tile(tiles, [&](int64_t tile, int64_t offset) {
    copy_tile(tiles, packed.as<const float>() + tile * tiles.elements(), tiles.width,
              x.as<float>() + offset, tiles.columns);
  });
}

}  // namespace tandem::cpu
