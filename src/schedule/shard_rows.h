// Rows as shard_of() cuts them into shards, by two numbers: for kernels and for the host that
// launches them.
#pragma once

#include <cstdint>

namespace tandem::schedule {

struct ShardRows {
  int least = 0;   ///< rows of a shard, at least
  int longer = 0;  ///< shards, the first ones, that have one row more

  constexpr int begin(int shard) const { return shard * least + (shard < longer ? shard : longer); }
  constexpr int count(int shard) const { return least + (shard < longer ? 1 : 0); }
  /// Of the longest shard.
  constexpr int most() const { return count(0); }
};

constexpr ShardRows shard_rows(int64_t rows, int shards) {
  return {int(rows / shards), int(rows % shards)};
}

/// Shards, the last ones, that have one tile of `tile_rows` fewer than the others.
constexpr int shards_with_fewer_tiles(const ShardRows& rows, int shards, int tile_rows) {
  return rows.longer > 0 && rows.least % tile_rows == 0 ? shards - rows.longer : 0;
}

/// Rows of tiles of a raster group: as equal as can be, at most `most`.
constexpr int even_band(int rows, int most) {
  const int groups = (rows + most - 1) / most;
  return (rows + groups - 1) / groups;
}

}  // namespace tandem::schedule
