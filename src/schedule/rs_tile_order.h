// The order in which one rank's fused GEMM+RS computes its output tiles (FLUX §3.1): first all that
// other ranks own, which then have the rest of the product to cross the wire, then its own, which
// add what the peers sent. Pure functions of a position, read by the GPU kernel and by the tests.
//
// Rows are cut into `ranks` shards of `shard_tiles` tiles, by owner; columns into `column_tiles`.
// The others' tiles are rasterised column by column, `band` rows of every shard at a time, in ring
// order within a column so that every owner gets its part of the wire; the own ones `own_band` rows
// at a time, which have one shard to stream through the cache instead of many. Never circular: an
// own tile waits for tiles that come before all own ones on every rank. What was sent first is not
// what is added first where the bands differ, but the columns of a band follow each other in both.
#pragma once

#include <cstdint>

#include "schedule/tile.h"

namespace tandem::schedule {

struct RsTileOrder {
  int rank = 0, ranks = 1;
  int shard_tiles = 1;
  int column_tiles = 1;
  int band = 1, own_band = 1;  ///< divide shard_tiles

  constexpr int64_t tiles() const { return int64_t(ranks) * shard_tiles * column_tiles; }
};

/// The tile at position `at`, 0 <= at < tiles().
constexpr Tile tile_at(const RsTileOrder& order, int at) {
  const int others = (order.ranks - 1) * order.shard_tiles * order.column_tiles;
  const bool own = at >= others;
  const int band = own ? order.own_band : order.band;
  const int of_column = own ? band : (order.ranks - 1) * band;
  const int i = own ? at - others : at;
  const int group = i / of_column, in_group = i % of_column;
  const int next = own ? order.rank : order.rank + 1 + in_group / band;
  const int owner = next >= order.ranks ? next - order.ranks : next;
  const int row = group / order.column_tiles * band + in_group % band;
  return {owner * order.shard_tiles + row, group % order.column_tiles};
}

/// The last position of who takes `first`, `first` + `step`, ...; first < tiles().
constexpr int last_position(const RsTileOrder& order, int first, int step) {
  return first + (int(order.tiles()) - 1 - first) / step * step;
}

}  // namespace tandem::schedule
