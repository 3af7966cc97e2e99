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
