// Rows split into shards by the rule of shard_of(), as two numbers: for kernels and for the host
// that launches them.
#pragma once

#include <cstdint>

namespace tandem::schedule {

struct ShardRows {
  int minimum = 0;  ///< min rows of a shard
  int longer = 0;   ///< number of first shards that have one more row

  constexpr int begin(int shard) const {
    return shard * minimum + (shard < longer ? shard : longer);
  }
  constexpr int count(int shard) const { return minimum + (shard < longer ? 1 : 0); }
  /// Rows of the longest shard.
  constexpr int maximum() const { return count(0); }
};

constexpr ShardRows shard_rows(int64_t rows, int shards) {
  return {int(rows / shards), int(rows % shards)};
}

/// Number of last shards that have one tile of `tile_rows` fewer than the others.
constexpr int shards_with_fewer_tiles(const ShardRows& rows, int shards, int tile_rows) {
  return rows.longer > 0 && rows.minimum % tile_rows == 0 ? shards - rows.longer : 0;
}

/// Rows of tiles of a raster group: as equal as possible, at most `maximum`.
constexpr int even_band(int rows, int maximum) {
  const int groups = (rows + maximum - 1) / maximum;
  return (rows + groups - 1) / groups;
}

}  // namespace tandem::schedule
