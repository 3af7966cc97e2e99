// What the clusters of one rank's GEMM+RS compute, and when, where tiles are moved beside it
// (overlap/gemm_rs/cuda/adding.h): the shards of rank + 1, rank + 2, ... and the own last
// (schedule/ring.h), each cut along its columns into pieces, which the copy engine sends when their
// last tile is done, and which the owner's tiles wait for in the same order. Where blocks send,
// they do so slice by slice. Within a piece, `band` rows of
// tiles are swept together, column by column, so that what is multiplied at one time fits the
// cache. Clusters take the tiles in turn, a wave at a time.
//
// The last wave may be split along K (wave_split.h), but only where all its tiles are own ones:
// others' are sent.
//
// Pure functions, for the host, which hands the kernel its works, and the tests. Never circular: an
// own tile waits for tiles that come before all own ones on every rank.
#pragma once

#include <cstdint>

#include "schedule/ring.h"
#include "schedule/wave_split.h"

namespace tandem::schedule {

struct RsPieceOrder {
  int rank = 0, ranks = 1;
  int row_tiles = 1;  ///< of a shard
  int column_tiles = 1;
  int pieces = 1;  ///< of a shard; divide column_tiles
  int band = 1;    ///< divides row_tiles
  int clusters = 1;
  int steps = 1;  ///< of a tile along K
  int added = 0;  ///< steps of an own tile that add parts
  int least = 1;  ///< steps along K that a work has at least
  WaveSplit split;

  constexpr int piece_columns() const { return column_tiles / pieces; }
  constexpr int piece_tiles() const { return row_tiles * piece_columns(); }
  constexpr int tiles() const { return ranks * row_tiles * column_tiles; }
};

struct PieceTile {
  int step;         ///< of the ring: the last one is the own shard
  int owner;        ///< of the shard
  int piece;        ///< of the shard
  int row, column;  ///< in the piece
};

/// The tile at position `at`, 0 <= at < tiles().
constexpr PieceTile tile_at(const RsPieceOrder& order, int at) {
  const int number = at / order.piece_tiles(), in_piece = at % order.piece_tiles();
  const int step = number / order.pieces, piece = number % order.pieces;
  const int of_band = order.band * order.piece_columns(), in_band = in_piece % of_band;
  return {step, rs_owner(order.rank, order.ranks, step), piece,
          in_piece / of_band * order.band + in_band % order.band, in_band / order.band};
}

/// Where a tile's columns are among all of the shard.
constexpr int column_of(const RsPieceOrder& order, const PieceTile& tile) {
  return tile.piece * order.piece_columns() + tile.column;
}

/// What a block sends of another rank's tile at a time: a shard's slices are numbered one column of
/// tiles after the other, each from top to bottom.
struct Slice {
  int step, number;
};

/// Number `at` of all that there are, in the order of their tiles, which have `slices` each.
constexpr Slice slice_at(const RsPieceOrder& order, int slices, int at) {
  const PieceTile tile = tile_at(order, at / slices);
  return {tile.step, (column_of(order, tile) * order.row_tiles + tile.row) * slices + at % slices};
}

/// Where no wave is left at the end, or others' tiles are in it, none is split.
constexpr Waves waves_of(const RsPieceOrder& order) {
  const int rest = order.tiles() % order.clusters;
  return {order.tiles(), order.clusters, order.steps,
          order.added,   order.least,    rest <= order.row_tiles * order.column_tiles ? rest : 0};
}

/// What a cluster does at a time: some steps of a tile.
struct PieceWork : TileSteps {
  PieceTile tile;
};

/// Number `index` of `cluster`'s works.
constexpr PieceWork work_at(const RsPieceOrder& order, int cluster, int index) {
  const TileWork work = work_of(waves_of(order), order.split, cluster, index);
  return {work.steps, tile_at(order, work.at)};
}

}  // namespace tandem::schedule
