// Configurations of a kernel: whole tiles only, or any number of rows. The latter is an instance of
// its own: if a shard ends within a tile, rows loaded past its end hold other rows or zeros, and
// their results are not stored. It also adds a bias.
#pragma once

#include "gemm/cuda/warpgroup_product.cuh"
#include "schedule/shard_rows.h"

namespace tandem::gpu::fused {

/// No bias; a shard is a multiple of a tile's rows.
struct WholeTiles {
  static constexpr bool kAny = false;
};
struct AnyRows {
  static constexpr bool kAny = true;
};

/// TileScales of a tile that ends after `rows` rows (possibly 0) from its first: scales past the
/// end are not read.
struct ClippedScales : TileScales {
  int rows;
  __device__ int row(int row) const { return min(row, rows - 1); }
};

/// Adds `bias`, which starts at the tile's first column and has `columns` elements.
template <class Element, size_t kSums>
__device__ void add_bias(float (&sums)[kSums], const Element* bias, int columns, int lane) {
#pragma unroll
  for (int i = 0; i < int(kSums) / 4; ++i) {
    const int column = 8 * i + 2 * (lane % 4);
    if (column >= columns) continue;
    const float2 values =
        Pair<Element>::unpack(__ldg(reinterpret_cast<const uint32_t*>(bias + column)));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sums[4 * i + 2 * half] += values.x;
      sums[4 * i + 2 * half + 1] += values.y;
    }
  }
}

}  // namespace tandem::gpu::fused
