// Shape of a fused GEMM+RS, whose tiles are delivered to the rank that owns their rows.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tandem/dtype.h"

namespace tandem::gpu {

/// Parameters common to all calls of a rank's operator; K is this rank's.
struct FusedRsShape {
  int64_t m, n, k;
  int rank, ranks;
  DType dtype, result;
  bool scaled_by_row = false;  ///< e4m3: per row; else one scale for x and one for the weight
  bool weight_kn = false;      ///< the weight is stored [k, n]

  /// Min K on every rank: the first k-blocks, under which a tile is stored, add no partials.
  static constexpr int64_t kMinK = 512;
  /// Shards are padded to a multiple of these rows, and to whole tiles of columns.
  static constexpr int kRows = 256;
  static constexpr int tile_columns(DType dtype) { return dtype == DType::e4m3 ? 128 : 256; }
  int64_t column_tiles() const { return (n + tile_columns(dtype) - 1) / tile_columns(dtype); }
  bool has_whole_shards() const { return m % (int64_t(ranks) * kRows) == 0; }
  int64_t shard_rows() const {
    const int64_t maximum = (m + ranks - 1) / ranks;
    return (maximum + kRows - 1) / kRows * kRows;
  }
  /// Bytes of a shard padded to whole tiles.
  size_t slot_bytes() const {
    return size_t(shard_rows() * column_tiles() * tile_columns(dtype)) * size_of(result);
  }
  /// Rows of a slice, the unit in which tiles are stored and signalled: within a shard, one column
  /// of tiles after another.
  static constexpr int kSliceRows = 64;
  int64_t slices() const { return column_tiles() * (shard_rows() / kSliceRows); }
};

}  // namespace tandem::gpu
