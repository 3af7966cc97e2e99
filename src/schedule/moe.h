// Who holds which expert, and in which pieces rows travel to the experts and back (COMET,
// arXiv 2502.19811, §3.1). Pure functions, usable in constant expressions on host and device.
//
// Before the experts the tensor is split along M: each expert's rows are sorted by the rank they
// come from, own rows first, then the pieces of all other ranks in the order in which they arrive.
// After the experts it is split along N: groups of columns of all remote rows leave one after the
// other while the next is computed; rows that stay are computed last.
//
// Invariants (tested exhaustively): every expert has one holder, every row and column is in one
// piece, and a wave is a run of whole pieces whatever the number of waves.
#pragma once

#include "schedule/ring.h"

namespace tandem::schedule {

/// ep x tp ranks: rank r has part r % tp of every expert that EP rank r / tp holds.
struct MoeGrid {
  int experts = 1, ep = 1, tp = 1;
  constexpr int world() const { return ep * tp; }
  /// Experts of `rank`; ep divides experts.
  constexpr Range local(int rank) const { return split(experts, ep, rank / tp); }
  /// First of the tp ranks that hold `expert`.
  constexpr int holder(int expert) const { return expert / (experts / ep) * tp; }
};

/// Whom `rank` sends to at `step` in [1, world), and who sends to it then.
constexpr int moe_target(int rank, int world, int step) {
  return (rank + step) % world;
}
constexpr int moe_source(int rank, int world, int step) {
  return (rank - step + world) % world;
}

/// Most pieces in which one rank's rows travel to another: 1/2, 1/4, 1/8, 1/16, 1/16.
constexpr int kMoePieces = 5;

/// Wave `wave` in [0, waves) of the rows that one rank sends to another; waves <= kMoePieces.
constexpr Range moe_wave(int64_t rows, int waves, int wave) {
  return taper_rows(rows, waves, wave, Taper::falling);
}
/// The piece in [0, kMoePieces) that row `row` of `rows` belongs to.
constexpr int moe_piece_of(int64_t rows, int64_t row) {
  int piece = 0;
  while (row >= moe_wave(rows, kMoePieces, piece).end()) ++piece;
  return piece;
}
/// Pieces that wave `wave` of `waves` consists of.
constexpr Range moe_pieces(int waves, int wave) {
  return {wave, wave + 1 == waves ? kMoePieces - wave : 1};
}

/// Load of the fullest EP rank over the mean, by rank's rows times experts: 1 is even.
constexpr double moe_imbalance(const int64_t* loads, int ep) {
  int64_t most = 0, all = 0;
  for (int i = 0; i < ep; ++i) {
    most = loads[i] > most ? loads[i] : most;
    all += loads[i];
  }
  return all == 0 ? 1 : double(most) * ep / double(all);
}
/// The most that can be, since a row's experts differ.
constexpr double moe_most_imbalance(const MoeGrid& grid, int top_k) {
  const int each = grid.experts / grid.ep;
  return double(grid.ep) * (each < top_k ? each : top_k) / top_k;
}

// How a stage runs best depends on how uneven its rows are: where one rank computes most of them,
// there is less to hide and smaller pieces to multiply. Plans are measured at imbalances 1, 2, 4
// ... up to the most; a call takes the level that is nearest to what its ranks have routed.
constexpr int moe_levels(const MoeGrid& grid, int top_k) {
  int levels = 1;
  while (double(1 << (levels - 1)) < moe_most_imbalance(grid, top_k)) ++levels;
  return levels;
}
/// The imbalance that `level` is measured at.
constexpr double moe_level_imbalance(const MoeGrid& grid, int top_k, int level) {
  const double most = moe_most_imbalance(grid, top_k), power = double(1 << level);
  return power < most ? power : most;
}
/// The level nearest to `imbalance`, by ratio.
constexpr int moe_level(const MoeGrid& grid, int top_k, double imbalance) {
  int level = 0;
  for (; level + 1 < moe_levels(grid, top_k); ++level) {
    const double here = moe_level_imbalance(grid, top_k, level),
                 next = moe_level_imbalance(grid, top_k, level + 1);
    if (imbalance * imbalance < here * next) break;
  }
  return level;
}

/// Columns are cut between blocks of this many.
constexpr int64_t kMoeColumns = 32;

/// Column group `group` of `groups`: sizes double, since the wire waits for the first. Cut between
/// blocks of `block` columns.
constexpr Range moe_columns(int64_t columns, int groups, int group, int64_t block = kMoeColumns) {
  const int64_t blocks = (columns + block - 1) / block;
  const Range part = taper_rows(blocks, groups, group, Taper::rising);
  const int64_t begin = part.begin * block, end = part.end() * block;
  const int64_t low = begin < columns ? begin : columns;
  return {low, (end < columns ? end : columns) - low};
}

}  // namespace tandem::schedule
