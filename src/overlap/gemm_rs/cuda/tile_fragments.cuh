// Memory layout of a tile of partial sums in the send buffer or in its owner's staging memory:
// 16-byte vectors of 8 elements; first vector 0 of all threads of the GEMM, then vector 1
// of all, ..., so that a warp reads and writes 512 contiguous bytes. A vector holds the elements of
// one row and 32 columns of the tile that is in one thread's accumulators; the four lanes of a quad
// together hold the 32 columns.
#pragma once

#include <cutlass/numeric_conversion.h>

#include <cute/tensor.hpp>

#include "overlap/gemm_rs/cuda/scatter.cuh"

namespace tandem::gpu::fused {

constexpr int kWarpgroup = 128;

/// A tile of kColumns columns computed by kThreads threads: 64 rows per warpgroup, then the next 64
/// if one warpgroup has all 128.
template <class Element, int kColumns, int kThreads>
struct TileFragments {
  static constexpr int kRows = 128;
  static constexpr int kVecs = kRows * kColumns / kThreads / 8;  // per thread
  static constexpr int kTileBytes = kRows * kColumns * int(sizeof(Element));
  using Vec = cutlass::Array<Element, 8>;
  using Floats = cutlass::Array<float, 8>;

  template <class Accumulators>
  CUTLASS_DEVICE static uint4 vec_of(Accumulators const& accumulators, int vec) {
    static_assert(int(cute::size(Accumulators{})) == kVecs * 8);
    // Two columns of a row, two of the row 8 below, the same of the next 8 columns, ...
    Floats values;
    CUTLASS_PRAGMA_UNROLL
    for (int e = 0; e < 8; ++e)
      values[e] = accumulators(vec / 2 * 16 + vec % 2 * 2 + e / 2 * 4 + e % 2);
    return to_words(values);
  }

  CUTLASS_DEVICE static Floats to_floats(uint4 words) {
    return cutlass::NumericArrayConverter<float, Element, 8>{}(reinterpret_cast<Vec const&>(words));
  }
  CUTLASS_DEVICE static uint4 to_words(Floats const& values) {
    const Vec rounded = cutlass::NumericArrayConverter<Element, float, 8>{}(values);
    return reinterpret_cast<uint4 const&>(rounded);
  }

  /// Address of a local tile in the output, and the columns from there to the right edge.
  struct Corner {
    Element* out;
    int columns;
  };
  CUTLASS_DEVICE static Corner corner(Scatter const& scatter, int row, int column) {
    const int64_t first = int64_t(scatter.locate(row, column).row) * kRows;
    const int left = column * kColumns;
    return {static_cast<Element*>(scatter.out) + first * scatter.n + left, scatter.n - left};
  }

  /// Stores `sum`, vector `vec` of `thread`, to a local tile; called by all lanes of a warp.
  CUTLASS_DEVICE static void store_sum(Scatter const& scatter, Corner const& corner, int vec,
                                       int thread, Floats const& sum) {
    constexpr int kGroups = kColumns / 32;  // groups of 32 columns
    const uint4 words = transpose_quad(to_words(sum), thread);
    const int row = vec / 2 / kGroups * 64 + vec % 2 * 8 + thread / 32 * 16 + thread % 32 / 4;
    const int column = vec / 2 % kGroups * 32 + thread % 4 * 8;
    if (column >= corner.columns) return;
    *reinterpret_cast<uint4*>(corner.out + int64_t(row) * scatter.n + column) = words;
  }

 private:
  // Before: a quad's lanes have columns 2c, 2c + 1 of each 8 of 32; after: lane c has the c-th 8.
  CUTLASS_DEVICE static uint4 transpose_quad(uint4 words, int thread) {
    const bool odd = thread & 1, upper = thread & 2;
    swap_words(odd, 1, words.x, words.y);
    swap_words(odd, 1, words.z, words.w);
    swap_words(upper, 2, words.x, words.z);
    swap_words(upper, 2, words.y, words.w);
    return words;
  }
  CUTLASS_DEVICE static void swap_words(bool gives_first, int distance, uint32_t& first,
                                        uint32_t& second) {
    const uint32_t got = __shfl_xor_sync(0xffffffffu, gives_first ? first : second, distance);
    (gives_first ? first : second) = got;
  }
};

}  // namespace tandem::gpu::fused
