// What a kernel whose tiles are all whole and one for any number of rows differ in. The latter has
// an instance of its own: where shards end within a tile, what is loaded behind their end is some
// other rows or zero, and what comes of it is not stored. It adds a bias, too.
#pragma once

#include "gemm/cuda/warpgroup_product.cuh"
#include "schedule/shard_rows.h"

namespace tandem::gpu::fused {

/// No bias; a shard is a multiple of the rows of tiles.
struct WholeTiles {
  static constexpr bool kAny = false;
};
struct AnyRows {
  static constexpr bool kAny = true;
};

/// TileScales of a tile that ends behind `rows`, from its first row on: what lies behind is not
/// read. It may be none of them.
struct ClippedScales : TileScales {
  int rows;
  __device__ int row(int row) const { return min(row, rows - 1); }
};

/// Adds `bias`, of the tile's first column on, of which there are `columns`.
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
