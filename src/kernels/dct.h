// Discrete cosine transform of a matrix by tiles, as DeMo decorrelates what it sends (arXiv
// 2411.19870, section 3.2). Orthonormal: the inverse is the transpose, and magnitudes of
// coefficients are comparable between tiles.
#pragma once

#include <cstdint>

#include "core/exec.h"

namespace tandem {

constexpr int kMaxDctTile = 64;

/// Tiles of a matrix of equal size. Coefficients are stored by tile: tiles by rows of tiles, and
/// each one's by rows.
struct DctTiles {
  int64_t rows = 0, columns = 0;  ///< of the matrix
  int height = 1, width = 1;      ///< of a tile

  /// The largest tiles of at most `side` (1 to kMaxDctTile) that divide both sizes.
  static DctTiles of(int64_t rows, int64_t columns, int side);
  int elements() const { return height * width; }
  int64_t tiles() const { return rows / height * (columns / width); }
};

/// coefficients = scale x DCT-II of each tile of x: with N a tile's size in a dimension, the sum of
/// x[n] sqrt((k ? 2 : 1) / N) cos(pi k (2 n + 1) / (2 N)), in both dimensions. f32, contiguous, x
/// [rows, columns], coefficients as many elements; apart from each other. Throws InvalidArgument.
void dct_forward(const Exec& exec, const DctTiles& tiles, float scale, const Tensor& x,
                 const Tensor& coefficients);
/// Inverse: x of coefficients.
void dct_inverse(const Exec& exec, const DctTiles& tiles, const Tensor& coefficients,
                 const Tensor& x);

/// The elements of a matrix by tile, as coefficients are stored, and back. Tensors as above.
void to_tiles(const Exec& exec, const DctTiles& tiles, const Tensor& x, const Tensor& packed);
void from_tiles(const Exec& exec, const DctTiles& tiles, const Tensor& packed, const Tensor& x);

}  // namespace tandem
