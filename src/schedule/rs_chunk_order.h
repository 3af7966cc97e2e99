// Order of the clusters' work in a rank's GEMM+RS that adds received tiles in the main loop
// (overlap/gemm_rs/cuda/fused.h). There are two orders. Local tiles are those of this rank's
// shard; the other ranks' are remote.
//
// By chunks, if the copy engine sends: the shards of rank + 1, rank + 2, ..., the local one last
// (schedule/ring.h), each cut along its columns into chunks. A chunk is sent when its last tile is
// done, and the owner's tiles wait for chunks in the same order.
//
// By columns, if tiles are stored into their owner's memory as they are finished: tiles of all
// remote shards are interleaved, so that every owner gets its share of the bandwidth at any time
// and all that is added to a tile arrives at one time. Either all local tiles are last, or only
// `last` of them and the others are interleaved with the remote ones, so that sends have the time
// of the whole GEMM and not only that of the remote tiles; each interleaved one follows the remote
// tiles of its position by at least about `last` tiles. Or all local tiles are last, and one in
// `later` remote tiles, at the positions of the last local ones, is sent during local ones.
//
// Tiles are rasterised in groups of `band` rows of tiles of a shard, column by column, so that the
// working set fits L2. Clusters take the tiles round-robin, a wave at a time. The last wave may be
// split along K (wave_split.h), but only if all its tiles are local: remote ones are sent.
//
// For the host, which passes the kernel its work items, and the tests. Free of cycles: a local tile
// waits only for tiles that precede it in every rank's order.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "schedule/ring.h"
#include "schedule/wave_split.h"

namespace tandem::schedule {

struct RsChunkOrder {
  int rank = 0, ranks = 1;
  int row_tiles = 1;  ///< per shard
  int column_tiles = 1;
  int chunks = 1;                ///< chunks per shard; divide column_tiles; 0: by columns
  int band = 1, local_band = 1;  ///< the last may have fewer; equal if local tiles are interleaved
  int last = 0;                  ///< by columns: max local tiles at the end
  int later = 0;  ///< by columns: one in `later` positions of a shard is sent later; 0: none
  int clusters = 1;
  int steps = 1;    ///< K steps per tile
  int added = 0;    ///< steps of a local tile that add received rows
  int minimum = 1;  ///< min K steps per work item
  WaveSplit split;
  int shorter = 0;  ///< number of last shards that have one row of tiles less; by columns, and with
                    ///< all local tiles at the end

  constexpr int chunk_columns() const { return column_tiles / std::max(chunks, 1); }
  constexpr int chunk_tiles() const { return row_tiles * chunk_columns(); }
  constexpr int shard_tiles() const { return row_tiles * column_tiles; }
  constexpr int tiles() const { return ranks * shard_tiles() - shorter * column_tiles; }
  constexpr int rows_of(int owner) const { return row_tiles - (owner >= ranks - shorter ? 1 : 0); }
  constexpr int local_tiles() const { return rows_of(rank) * column_tiles; }
  constexpr int local_last() const {
    return chunks > 0 ? local_tiles() : std::min(last, local_tiles());
  }
};

struct ChunkTile {
  int step;            ///< ring step: the last one is the local shard
  int owner;           ///< owner of the shard
  int chunk;           ///< chunk of the shard
  int row, column;     ///< in the shard
  bool later = false;  ///< sent after all tiles that are not
};

/// Rasterises band by band and column by column, with all of `steps` consecutive for each tile.
inline void sweep(const RsChunkOrder& order, int band, int first_step, int end_step, int chunk,
                  std::vector<ChunkTile>& tiles) {
  const int columns = order.chunk_columns();
  for (int first = 0; first < order.row_tiles; first += band) {
    for (int column = chunk * columns; column < (chunk + 1) * columns; ++column) {
      for (int row = first; row < std::min(first + band, order.row_tiles); ++row) {
        for (int step = first_step; step < end_step; ++step) {
          const int owner = rs_owner(order.rank, order.ranks, step);
          if (row < order.rows_of(owner)) tiles.push_back({step, owner, chunk, row, column});
        }
      }
    }
  }
}

/// Remote tiles, with those at the positions of the last tiles in `local` spread over all: about
/// the same share of every wave, and of every cluster.
inline std::vector<ChunkTile> with_later(const RsChunkOrder& order,
                                         const std::vector<ChunkTile>& remote,
                                         const std::vector<ChunkTile>& local) {
  std::vector<bool> is_later(size_t(order.shard_tiles()));
  for (size_t i = local.size() - local.size() / size_t(order.later); i < local.size(); ++i) {
    is_later[size_t(local[i].row * order.column_tiles + local[i].column)] = true;
  }
  std::vector<ChunkTile> first, later, all;
  for (ChunkTile tile : remote) {
    tile.later = is_later[size_t(tile.row * order.column_tiles + tile.column)];
    (tile.later ? later : first).push_back(tile);
  }
  size_t next_first = 0, next_later = 0;
  for (size_t i = 0; i < remote.size(); ++i) {
    const size_t clusters = size_t(order.clusters), turn = i % clusters + i / clusters;
    const bool due = (turn + 1) % size_t(order.later) == 0 && next_later < later.size();
    const bool takes_later = due || next_first == first.size();
    all.push_back(takes_later ? later[next_later++] : first[next_first++]);
  }
  return all;
}

/// All tiles, in order.
inline std::vector<ChunkTile> tiles_of(const RsChunkOrder& order) {
  std::vector<ChunkTile> tiles;
  for (int number = 0; number < order.ranks * order.chunks; ++number) {
    const int step = number / order.chunks;
    sweep(order, order.band, step, step + 1, number % order.chunks, tiles);
  }
  if (order.chunks > 0) return tiles;
  std::vector<ChunkTile> remote, local;
  sweep(order, order.band, 0, order.ranks - 1, 0, remote);
  sweep(order, order.local_band, order.ranks - 1, order.ranks, 0, local);
  if (order.later > 0) remote = with_later(order, remote, local);
  // The first interleaved local tile follows `last` remote tiles and those of the raster group that
  // it adds; the remaining remote tiles are spread evenly over the interleaved ones.
  const int between = int(local.size()) - order.local_last();
  const int all = int(remote.size());
  const int before = std::min(all, order.last + order.band * order.ranks);
  int next = 0;
  for (int i = 0; i < all; ++i) {
    tiles.push_back(remote[size_t(i)]);
    while (next < between &&
           int64_t(i + 1 - before) * between >= int64_t(next + 1) * (all - before)) {
      tiles.push_back(local[size_t(next++)]);
    }
  }
  tiles.insert(tiles.end(), local.begin() + next, local.end());
  return tiles;
}

/// Without a partial last wave, or with remote tiles in it, none is split. Remote tiles never
/// follow K slices of local ones.
constexpr Waves waves_of(const RsChunkOrder& order) {
  const int rest = order.tiles() % order.clusters, local = order.local_last();
  return {order.tiles(),
          order.clusters,
          order.steps,
          order.added,
          order.minimum,
          rest <= local ? rest : 0,
          rest + order.clusters <= local};
}

/// Work item of a cluster: some K steps of a tile.
struct ChunkWork : TileSteps {
  ChunkTile tile;
};

/// Order together with its tiles.
struct RsChunks {
  RsChunkOrder order;
  int clusters;
  std::vector<ChunkTile> tiles;

  explicit RsChunks(const RsChunkOrder& o) : order(o), clusters(o.clusters), tiles(tiles_of(o)) {}
};

/// Work item `index` of `cluster`.
inline ChunkWork work_at(const RsChunks& chunks, int cluster, int index) {
  const TileWork work = work_of(waves_of(chunks.order), chunks.order.split, cluster, index);
  if (work.steps.end == 0) return {};
  return {work.steps, chunks.tiles[size_t(work.at)]};
}

}  // namespace tandem::schedule
