// What the clusters of one rank's fused AG+GEMM compute, and when, where two blocks of a cluster
// take a pair of rows of tiles (overlap/ag_gemm/cuda/arriving_kernel.cuh): pairs in the order of
// ag_tile_order.h, a wave at a time, the last one split along K (wave_split.h). Where shards come
// one after another, tiles are rasterised in groups of `band` pairs of rows of a shard, column by
// column, so that the working set fits L2.
#pragma once

#include "schedule/ag_tile_order.h"
#include "schedule/wave_split.h"

namespace tandem::schedule {

struct AgWaveOrder {
  AgTileOrder rows;  ///< not in pairs; has_pairs_of_rows()
  int band = 1;      ///< pairs of rows of a raster group; the last one of a shard may have fewer
  int shorter = 0;   ///< shards, the last ones, that have a pair of rows less; more than one
                     ///< pair each
  int clusters = 1;
  int steps = 1;  ///< of a tile along K
  int least = 1;  ///< steps along K that a work has at least
  /// Rows of tiles that the wire brings in the time of a wave, some 14, whatever K is: 350 GB/s,
  /// and 70 us at K 6144 in bf16. Of e4m3 8: half the bytes, in little more than a quarter of the
  /// time.
  int rows_in_a_wave = 14;
  WaveSplit split;
};

constexpr Waves waves_of(const AgWaveOrder& order) {
  const int tiles =
      int(in_pairs_of_rows(order.rows).tiles()) - order.shorter * order.rows.column_tiles;
  // Pieces come a whole wave before the last one, when all rows must be there.
  const int rows = order.rows.row_tiles() - order.rows.shard_tiles;
  return {tiles,
          order.clusters,
          order.steps,
          0,
          order.least,
          tiles % order.clusters,
          (tiles / order.clusters - 1) * order.rows_in_a_wave > rows};
}

struct AgWork : TileSteps {
  int row = 0, column = 0;  ///< the tile of the cluster's first block; the other's is one row below
  int shard = 0;            ///< of the first block's rows
};

/// Whether a work whose rows have all arrived may be taken backwards along K. Both blocks of a
/// cluster load the same steps of the weight at a time, for both: where their rows are of two
/// shards, one may have arrived and the other not, and they go forwards always.
constexpr bool may_go_backwards(int shard_tiles) {
  return shard_tiles > 1;
}

/// Of a shard; also in_pairs_of_rows(order.rows).shard_tiles but for those that are shorter.
constexpr int pairs_of_shard(const AgWaveOrder& order, int shard) {
  const AgTileOrder pairs = in_pairs_of_rows(order.rows);
  return pairs.shard_tiles - (shard >= pairs.ranks - order.shorter ? 1 : 0);
}

/// Number `turned` of the pairs of rows that there are, from the own shard's first one on.
constexpr int turned_pair(const AgWaveOrder& order, int turned) {
  const AgTileOrder pairs = in_pairs_of_rows(order.rows);
  int shard = pairs.rank;
  for (; turned >= pairs_of_shard(order, shard); shard = (shard + 1) % pairs.ranks) {
    turned -= pairs_of_shard(order, shard);
  }
  return shard * pairs.shard_tiles + turned;
}

/// The pair of tiles at position `at`, as a tile of in_pairs_of_rows(order.rows): in the order of
/// tile_at(), but with bands.
constexpr Tile pair_at(const AgWaveOrder& order, int at) {
  const AgTileOrder pairs = in_pairs_of_rows(order.rows);
  const int own = pairs_of_shard(order, pairs.rank);
  const int rows = pairs.row_tiles() - order.shorter;
  if (pairs.head < pairs.column_tiles) {
    if (at < own * pairs.head) return {turned_pair(order, at % own), at / own};
    const int others = rows - own, remote = at - own * pairs.head;
    if (remote < others * pairs.head) {
      return {turned_pair(order, own + remote % others), remote / others};
    }
    const int rest = remote - others * pairs.head;
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

/// Number `index` of `cluster`'s works.
constexpr AgWork work_at(const AgWaveOrder& order, int cluster, int index) {
  const TileWork work = work_of(waves_of(order), order.split, cluster, index);
  const Tile pair = pair_at(order, work.at);
  const int row = 2 * pair.row;
  return {work.steps, row, pair.column, shard_of_row(order.rows, row)};
}

}  // namespace tandem::schedule
