// The order in which one rank's fused GEMM+RS computes its output tiles (FLUX §3.1): a tile that
// another rank owns well before the own tile of the same place, so that when the own one is summed
// the peers' parts of it, which they computed as early, have crossed the wire. Pure functions of a
// position, read by the GPU kernel and by the tests.
//
// Rows are cut into `ranks` shards of `shard_tiles` tiles, by owner; columns into `column_tiles`. A
// group is `band` rows of every shard in one column. Groups are swept column by column, band by
// band; in each, the others' tiles in ring order, then own tiles of the group `lag` before it. With
// lag == groups() all own tiles come last. Never circular: an own tile of group g waits for tiles
// that come before the own tiles of group g on every rank.
#pragma once

#include <cstdint>

#include "schedule/tile.h"

namespace tandem::schedule {

struct RsTileOrder {
  int rank = 0, ranks = 1;
  int shard_tiles = 1;
  int column_tiles = 1;
  int band = 1;  ///< divides shard_tiles
  int lag = 0;   ///< 0 to groups()

  constexpr int groups() const { return shard_tiles / band * column_tiles; }
  constexpr int64_t tiles() const { return int64_t(ranks) * shard_tiles * column_tiles; }
};

/// Tile `i` of a group: rows of rank + 1 first, the own ones last.
constexpr Tile tile_of_group(const RsTileOrder& order, int group, int i) {
  const int next = order.rank + 1 + i / order.band;
  const int owner = next >= order.ranks ? next - order.ranks : next;
  const int row = group / order.column_tiles * order.band + i % order.band;
  return {owner * order.shard_tiles + row, group % order.column_tiles};
}

/// The tile at position `at`, 0 <= at < tiles().
constexpr Tile tile_at(const RsTileOrder& order, int at) {
  const int own = order.band, others = (order.ranks - 1) * own, both = own + others;
  const int first = order.lag * others, middle = (order.groups() - order.lag) * both;
  if (at < first) return tile_of_group(order, at / others, at % others);
  if (at < first + middle) {
    const int group = (at - first) / both, i = (at - first) % both;
    return tile_of_group(order, i < others ? group + order.lag : group, i);
  }
  const int rest = at - first - middle;
  return tile_of_group(order, order.groups() - order.lag + rest / own, others + rest % own);
}

}  // namespace tandem::schedule
