// Order of the clusters' work in a rank's fused AG+GEMM if the two blocks of a cluster compute a
// pair of rows of tiles (overlap/ag_gemm/cuda/arriving_kernel.cuh): pairs in the order of
// ag_tile_order.h, a wave at a time, the last wave split along K (wave_split.h). If shards are
// computed one after another, tiles are rasterised in groups of `band` pairs of rows of a shard,
// column by column, so that the working set fits L2.
#pragma once

#include "schedule/ag_tile_order.h"
#include "schedule/wave_split.h"

namespace tandem::schedule {

struct AgWaveOrder {
  AgTileOrder rows;  ///< not in pairs; has_pairs_of_rows()
  int band = 1;      ///< pairs of rows of a raster group; the last one of a shard may have fewer
  int shorter = 0;   ///< number of last shards that have one pair of rows less; only if shards have
                     ///< more than one pair
  int clusters = 1;
  int steps = 1;    ///< K steps per tile
  int minimum = 1;  ///< min K steps per work item
  /// Rows of tiles that arrive in the time of a wave, about 14, whatever K is: 350 GB/s, and 70 us
  /// at K 6144 in bf16. For e4m3 8: half the bytes, in little more than a quarter of the time.
  int rows_in_a_wave = 14;
  WaveSplit split;
};

constexpr Waves waves_of(const AgWaveOrder& order) {
  const int tiles =
      int(in_pairs_of_rows(order.rows).tiles()) - order.shorter * order.rows.column_tiles;
  // K slices run a whole wave before the last one; by then all rows must have arrived.
  const int rows = order.rows.row_tiles() - order.rows.shard_tiles;
  return {tiles,
          order.clusters,
          order.steps,
          0,
          order.minimum,
          tiles % order.clusters,
          (tiles / order.clusters - 1) * order.rows_in_a_wave > rows};
}

struct AgWork : TileSteps {
  int row = 0, column = 0;  ///< tile of the cluster's first block; the other's is one row below
  int shard = 0;            ///< shard of the first block's rows
};

/// Whether a work item whose rows have all arrived may traverse K backwards. Both blocks of a
/// cluster load the same K steps of the weight at a time, for both: if their rows are of two
/// shards, one may have arrived and the other not, so they always go forwards.
constexpr bool may_go_backwards(int shard_tiles) {
  return shard_tiles > 1;
}

/// Pairs of rows of a shard: in_pairs_of_rows(order.rows).shard_tiles, except for the shorter ones.
constexpr int pairs_of_shard(const AgWaveOrder& order, int shard) {
  const AgTileOrder pairs = in_pairs_of_rows(order.rows);
  return pairs.shard_tiles - (shard >= pairs.ranks - order.shorter ? 1 : 0);
}

/// Pair of rows number `turned`, counted from the local shard's first, modulo all pairs.
constexpr int turned_pair(const AgWaveOrder& order, int turned) {
  const AgTileOrder pairs = in_pairs_of_rows(order.rows);
  int shard = pairs.rank;
  for (; turned >= pairs_of_shard(order, shard); shard = (shard + 1) % pairs.ranks) {
    turned -= pairs_of_shard(order, shard);
  }
  return shard * pairs.shard_tiles + turned;
}

/// Pair of tiles at position `at`, as a tile of in_pairs_of_rows(order.rows): in the order of
/// tile_at(), but with bands.
constexpr Tile pair_at(const AgWaveOrder& order, int at) {
  const AgTileOrder pairs = in_pairs_of_rows(order.rows);
  const int local = pairs_of_shard(order, pairs.rank);
  const int rows = pairs.row_tiles() - order.shorter;
  if (pairs.head < pairs.column_tiles) {
    if (at < local * pairs.head) return {turned_pair(order, at % local), at / local};
    const int remote_rows = rows - local, remote = at - local * pairs.head;
    if (remote < remote_rows * pairs.head) {
      return {turned_pair(order, local + remote % remote_rows), remote / remote_rows};
    }
    const int rest = remote - remote_rows * pairs.head;
    return {turned_pair(order, rest % rows), pairs.head + rest / rows};
  }
  int shard = pairs.rank;
  for (; at >= pairs_of_shard(order, shard) * pairs.column_tiles;
       shard = (shard + 1) % pairs.ranks) {
    at -= pairs_of_shard(order, shard) * pairs.column_tiles;
  }
  const int first = at / (order.band * pairs.column_tiles) * order.band;
  const int left = pairs_of_shard(order, shard) - first,
            band = left < order.band ? left : order.band;
  const int in_band = at - first * pairs.column_tiles;
  return {shard * pairs.shard_tiles + first + in_band % band, in_band / band};
}

/// Work item `index` of `cluster`.
constexpr AgWork work_at(const AgWaveOrder& order, int cluster, int index) {
  const TileWork work = work_of(waves_of(order), order.split, cluster, index);
  const Tile pair = pair_at(order, work.at);
  const int row = 2 * pair.row;
  return {work.steps, row, pair.column, shard_of_row(order.rows, row)};
}

}  // namespace tandem::schedule
