// Ring schedules: peers, their order, and the rows of each step. Pure functions, usable in constant
// expressions, on host and device (CUDA sources are compiled with --expt-relaxed-constexpr): shared
// by the operators of CPU and GPU ranks, so they cannot disagree. Tile orders of kernels are in
// separate files of this folder.
//
// Invariants (tested exhaustively): every row and chunk is visited exactly once; at one step no two
// ranks send to the same peer.
#pragma once

#include <cstdint>

namespace tandem::schedule {

/// Max transfers per shard.
constexpr int kMaxChunks = 16;

/// Rows [begin, begin + count).
struct Range {
  int64_t begin = 0, count = 0;
  constexpr int64_t end() const { return begin + count; }
};

/// Shard `index` of `total` rows in `num_shards` shards: sizes differ by at most one, larger ones
/// first (same rule as tandem::shard_of).
constexpr Range split(int64_t total, int num_shards, int index) {
  const int64_t base = total / num_shards, extra = total % num_shards;
  return {index * base + (index < extra ? index : extra), base + (index < extra ? 1 : 0)};
}

/// Part of `split` that contains `row`.
constexpr int owner_of(int64_t total, int num_shards, int64_t row) {
  const int64_t base = total / num_shards, extra = total % num_shards;
  const int64_t large = extra * (base + 1);
  return int(row < large ? row / (base + 1) : extra + (row - large) / base);
}

// ---- All-gather + GEMM: local shard first, then that of rank+1, rank+2, ... ------------------

/// Rank whose shard `rank` computes on at `step` in [0, world); step 0 is the local shard.
constexpr int ag_source(int rank, int world, int step) {
  return (rank + step) % world;
}
/// Destination of `rank`'s shard at `step` in [1, world): the rank that computes on it then.
constexpr int ag_target(int rank, int world, int step) {
  return (rank - step + world) % world;
}

// ---- GEMM + reduce-scatter: rows of rank+1 first, then rank+2, ..., local rows last ------------

/// Owner of the rows that `rank` computes (and sends) at `step` in [0, world); itself at the last
/// step.
constexpr int rs_owner(int rank, int world, int step) {
  return (rank + 1 + step) % world;
}
/// Rank that sends to `rank` at `step` in [0, world - 1).
constexpr int rs_source(int rank, int world, int step) {
  return (rank - 1 - step + world) % world;
}

// ---- Chunks: each shard is sent in `chunks` chunks, each with its own signal -------------------
//
// Sizes halve towards the end if the computation waits for arrivals, and double from the start if
// sends wait for the computation: 1/2, 1/4, 1/8, 1/8 or the reverse. If the transfer takes as long
// as the whole GEMM, the local shard and then each chunk keep the SMs busy until the next one has
// arrived, and only the smallest chunk is exposed.

enum class Taper {
  falling,  ///< all-gather + GEMM: only the last chunk is computed after the last arrival
  rising,   ///< GEMM + reduce-scatter: only the first chunk is computed before the first send
};

/// Chunk `index` of `total` rows.
constexpr Range taper_rows(int64_t total, int chunks, int index, Taper taper) {
  const int from_large = taper == Taper::falling ? index : chunks - 1 - index;
  const int64_t begin = total - (total >> from_large);
  const int64_t end = from_large + 1 == chunks ? total : total - (total >> (from_large + 1));
  return {taper == Taper::falling ? begin : total - end, end - begin};
}

/// Global rows of chunk `chunk` of `owner`'s shard.
constexpr Range chunk_rows(int64_t m, int world, int owner, int chunks, int chunk, Taper taper) {
  const Range shard = split(m, world, owner);
  const Range range = taper_rows(shard.count, chunks, chunk, taper);
  return {shard.begin + range.begin, range.count};
}

/// Global index of a chunk, in row order.
constexpr int chunk_id(int owner, int chunks, int chunk) {
  return owner * chunks + chunk;
}

/// Global index of the chunk that contains `row`.
constexpr int chunk_of_row(int64_t m, int world, int chunks, int64_t row, Taper taper) {
  const int owner = owner_of(m, world, row);
  int chunk = 0;
  while (row >= chunk_rows(m, world, owner, chunks, chunk, taper).end()) ++chunk;
  return chunk_id(owner, chunks, chunk);
}

// ---- GEMM + all-reduce: panels of rows, each reduced and gathered while the next is computed --

/// Rows of panel `panel` that `owner` sums.
constexpr Range ar_rows(int64_t m, int world, int panels, int panel, int owner) {
  const Range whole = split(m, panels, panel);
  const Range range = split(whole.count, world, owner);
  return {whole.begin + range.begin, range.count};
}
/// Number of rows that `owner` sums in the panels before `panel`.
constexpr int64_t ar_rows_before(int64_t m, int world, int panels, int panel, int owner) {
  int64_t rows = 0;
  for (int p = 0; p < panel; ++p) rows += ar_rows(m, world, panels, p, owner).count;
  return rows;
}
/// Max rows that one rank sums, for any number of panels up to `max_panels`.
constexpr int64_t ar_rows_bound(int64_t m, int world, int max_panels) {
  return m / world + max_panels + 1;
}

}  // namespace tandem::schedule
