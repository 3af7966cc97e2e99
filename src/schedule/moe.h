// Distribution of experts over ranks, and the chunks in which rows are dispatched and combined
// (COMET, arXiv 2502.19811, §3.1). Pure functions, usable in constant expressions on host and
// device.
//
// Dispatch splits the tensor along M: each expert's rows are sorted by source rank, local rows
// first, then the chunks of all other ranks in order of arrival. Combine splits it along N: column
// groups of all remote rows are sent one after the other while the next is computed; local rows are
// computed last.
//
// Invariants (tested exhaustively): every expert is held by one EP rank, every row and column is in
// one chunk, and a wave is a run of whole chunks whatever the number of waves.
#pragma once

#include "schedule/ring.h"

namespace tandem::schedule {

/// Grid of ep x tp ranks: rank r has shard r % tp of every expert of EP rank r / tp.
struct MoeGrid {
  int experts = 1, ep = 1, tp = 1;
  constexpr int world() const { return ep * tp; }
  /// Experts of `rank`; ep divides experts.
  constexpr Range local(int rank) const { return split(experts, ep, rank / tp); }
  /// First of the tp ranks that hold `expert`.
  constexpr int holder(int expert) const { return expert / (experts / ep) * tp; }
};

/// Destination and source of `rank` at `step`, 1 <= step < world.
constexpr int moe_target(int rank, int world, int step) {
  return (rank + step) % world;
}
constexpr int moe_source(int rank, int world, int step) {
  return (rank - step + world) % world;
}

/// Max chunks of the rows that one rank sends to another: 1/2, 1/4, 1/8, 1/16, 1/16.
constexpr int kMaxMoeWaves = 5;

/// Wave `wave` in [0, waves) of the rows that one rank sends to another; waves <= kMaxMoeWaves.
constexpr Range moe_wave(int64_t rows, int waves, int wave) {
  return taper_rows(rows, waves, wave, Taper::falling);
}
/// Chunk in [0, kMaxMoeWaves) that contains row `row` of `rows`.
constexpr int moe_wave_of(int64_t rows, int64_t row) {
  int wave = 0;
  while (row >= moe_wave(rows, kMaxMoeWaves, wave).end()) ++wave;
  return wave;
}
/// Chunks of wave `wave` of `waves`.
constexpr Range moe_waves_of_chunk(int waves, int wave) {
  return {wave, wave + 1 == waves ? kMaxMoeWaves - wave : 1};
}

/// Max load of an EP rank over the mean, in rows times experts; 1 is balanced.
constexpr double moe_imbalance(const int64_t* loads, int ep) {
  int64_t maximum = 0, all = 0;
  for (int i = 0; i < ep; ++i) {
    maximum = loads[i] > maximum ? loads[i] : maximum;
    all += loads[i];
  }
  return all == 0 ? 1 : double(maximum) * ep / double(all);
}
/// Upper bound of the imbalance, given that a row's experts differ.
constexpr double moe_max_imbalance(const MoeGrid& grid, int top_k) {
  const int each = grid.experts / grid.ep;
  return double(grid.ep) * (each < top_k ? each : top_k) / top_k;
}

// The best plan of a stage depends on the imbalance: if one rank computes most rows, there is less
// to hide, and GEMM chunks are smaller. Plans are timed at imbalances 1, 2, 4 ... up to the max; a
// call uses the level nearest to the routing of its ranks.
constexpr int moe_levels(const MoeGrid& grid, int top_k) {
  int levels = 1;
  while (double(1 << (levels - 1)) < moe_max_imbalance(grid, top_k)) ++levels;
  return levels;
}
/// Imbalance at which `level` is timed.
constexpr double moe_level_imbalance(const MoeGrid& grid, int top_k, int level) {
  const double maximum = moe_max_imbalance(grid, top_k), power = double(1 << level);
  return power < maximum ? power : maximum;
}
/// Level nearest to `imbalance`, by ratio.
constexpr int moe_level(const MoeGrid& grid, int top_k, double imbalance) {
  int level = 0;
  for (; level + 1 < moe_levels(grid, top_k); ++level) {
    const double here = moe_level_imbalance(grid, top_k, level),
                 next = moe_level_imbalance(grid, top_k, level + 1);
    if (imbalance * imbalance < here * next) break;
  }
  return level;
}

/// Default block size of column groups.
constexpr int64_t kMoeColumns = 32;

/// Column group `group` of `groups`: sizes double, since the first send waits for the first group.
/// Boundaries are multiples of `block` columns.
constexpr Range moe_columns(int64_t columns, int groups, int group, int64_t block = kMoeColumns) {
  const int64_t blocks = (columns + block - 1) / block;
  const Range range = taper_rows(blocks, groups, group, Taper::rising);
  const int64_t begin = range.begin * block, end = range.end() * block;
  const int64_t low = begin < columns ? begin : columns;
  return {low, (end < columns ? end : columns) - low};
}

}  // namespace tandem::schedule
