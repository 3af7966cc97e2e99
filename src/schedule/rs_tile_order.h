// Order in which a rank's fused GEMM+RS computes its output tiles (FLUX §3.1): first all remote
// tiles, whose transfers then overlap the rest of the GEMM, then the local ones, which add the
// received partial sums. Pure functions of a position, read by the GPU kernel and by the tests.
//
// Rows are cut into `ranks` shards of `shard_tiles` tiles, by owner; columns into `column_tiles`.
// Remote tiles are rasterised column by column, `band` rows of every shard at a time, in ring order
// within a column so that every owner gets its share of the bandwidth; local ones `local_band` rows
// at a time, as they stream one shard through the cache instead of many. Free of cycles: a local
// tile waits for tiles that precede all local ones on every rank. If the bands differ, the first
// tile sent is not the first one added, but the columns of a band are consecutive in both orders.
#pragma once

#include <cstdint>

#include "schedule/tile.h"

namespace tandem::schedule {

struct RsTileOrder {
  int rank = 0, ranks = 1;
  int shard_tiles = 1;
  int column_tiles = 1;
  int band = 1, local_band = 1;  ///< divide shard_tiles

  constexpr int64_t tiles() const { return int64_t(ranks) * shard_tiles * column_tiles; }
};

/// Tile at position `at`, 0 <= at < tiles().
constexpr Tile tile_at(const RsTileOrder& order, int at) {
  const int remote = (order.ranks - 1) * order.shard_tiles * order.column_tiles;
  const bool is_local = at >= remote;
  const int band = is_local ? order.local_band : order.band;
  const int of_column = is_local ? band : (order.ranks - 1) * band;
  const int i = is_local ? at - remote : at;
  const int group = i / of_column, in_group = i % of_column;
  const int next = is_local ? order.rank : order.rank + 1 + in_group / band;
  const int owner = next >= order.ranks ? next - order.ranks : next;
  const int row = group / order.column_tiles * band + in_group % band;
  return {owner * order.shard_tiles + row, group % order.column_tiles};
}

/// Last position in the sequence `first`, `first` + `step`, ...; first < tiles().
constexpr int last_position(const RsTileOrder& order, int first, int step) {
  return first + (int(order.tiles()) - 1 - first) / step * step;
}

}  // namespace tandem::schedule
