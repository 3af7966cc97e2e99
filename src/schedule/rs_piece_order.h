// What the clusters of one rank's GEMM+RS compute, and when, where the copy engine moves the tiles
// (overlap/gemm_rs/cuda/adding.h): the shards of rank + 1, rank + 2, ... and the own last
// (schedule/ring.h), each cut along its columns into pieces that are sent when their last tile is
// done, and which the owner's tiles wait for in the same order. Within a piece, `band` rows of
// tiles are swept together, column by column, so that what is multiplied at one time fits the
// cache. Clusters take the tiles in turn, a wave at a time.
//
// Where the last wave would leave clusters idle, its tiles are split along K: the cluster that has
// a tile does the beginning, adds the parts and stores it; a helper does the end and leaves its
// sums in memory, for the first one to add. A helper serves up to four tiles, or a tile has up to
// three helpers. So there are a few fronts along K, and clusters still read the same
// operands at the same time: with equal runs of steps that begin anywhere, as in stream-K, they did
// not, and that cost more than it gained. Only own tiles are split: others' are sent.
//
// Pure functions, for the host, which hands the kernel its works, and the tests. Never circular: an
// own tile waits for tiles that come before all own ones on every rank; a split one for helpers,
// which wait for nobody.
#pragma once

#include <cstdint>

#include "schedule/ring.h"

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
  /// How the last wave is split; none where served is 0.
  struct Split {
    int served = 0;   ///< tiles by one helper
    int helpers = 1;  ///< of one tile; one of the two is 1
    int begin = 0;    ///< steps along K of a tile that no helper does
  } split;

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

/// Tiles of a last wave that is not full; 0 where there is none but others' tiles are in it.
constexpr int last_wave(const RsPieceOrder& order) {
  const int rest = order.tiles() % order.clusters;
  return rest <= order.row_tiles * order.column_tiles ? rest : 0;
}

/// The split of the last wave that ends soonest, if it gains anything worth it. Times are in tenths
/// of a step along K, as measured: a helper's writing, the time until it is seen, adding.
constexpr RsPieceOrder::Split best_split(const RsPieceOrder& order) {
  constexpr int kStep = 10, kPart = 7, kLend = 70, kSeen = 30, kBorrow = 40, kWorth = 40;
  constexpr int kMostServed = 4, kMostHelpers = 3;
  const int rest = last_wave(order);
  int soonest = order.steps * kStep - kWorth;
  RsPieceOrder::Split best;
  const auto consider = [&](int served, int helpers) {
    if (rest + (rest * helpers + served - 1) / served > order.clusters) return;
    for (int begin = order.least; begin + helpers * order.least <= order.steps; ++begin) {
      const int piece = (order.steps - begin + helpers - 1) / helpers;
      const int helped = served * (piece * kStep + kLend) + kSeen;
      const int done = begin * kStep + order.added * kPart;
      const int end = (helped > done ? helped : done) + helpers * kBorrow - order.added * kPart;
      if (end >= soonest) continue;
      soonest = end;
      best = {served, helpers, begin};
    }
  };
  if (rest == 0) return best;
  for (int served = 1; served <= kMostServed; ++served) consider(served, 1);
  for (int helpers = 2; helpers <= kMostHelpers; ++helpers) consider(1, helpers);
  return best;
}

/// What a cluster does at a time: some steps of a tile.
struct PieceWork {
  PieceTile tile;
  int begin = 0, end = 0;  ///< steps along K; none: there is no such work
  bool lends = false;      ///< a helper's: the sums go to place `lent`
  int borrows = 0;         ///< adds the sums that helpers left, in places from `lent` on
  int lent = 0;            ///< below last_wave() * helpers
};

/// Number `index` of `cluster`'s works.
constexpr PieceWork work_at(const RsPieceOrder& order, int cluster, int index) {
  const RsPieceOrder::Split& split = order.split;
  const int rest = split.served == 0 ? 0 : last_wave(order), whole = order.tiles() - rest;
  const int at = cluster + index * order.clusters;
  if (at < whole) return {tile_at(order, at), 0, order.steps};
  if (rest == 0) return {};
  const int number = index - whole / order.clusters;  // of the last wave's
  if (cluster < rest) {
    if (number > 0) return {};
    return {tile_at(order, whole + cluster), 0, split.begin, false, split.helpers,
            cluster * split.helpers};
  }
  const int helper = cluster - rest, part = helper % split.helpers;
  const int tile = helper / split.helpers * split.served + number;
  if (number >= split.served || tile >= rest) return {};
  const int steps = order.steps - split.begin;
  return {tile_at(order, whole + tile),
          split.begin + part * steps / split.helpers,
          split.begin + (part + 1) * steps / split.helpers,
          true,
          0,
          tile * split.helpers + part};
}

}  // namespace tandem::schedule
