// Rows of context-parallel ranks: which positions of a sequence a rank has, and which rows of
// another rank its queries read. Pure functions, usable in constant expressions, on host and
// device.
//
// Causal attention gives later positions more work, so a sequence is split into 2 x ranks chunks,
// and rank r has chunks r (the head) and 2 x ranks - 1 - r (the tail): every rank then has the same
// work, and so has every pair of ranks. Any number of positions is valid: chunks differ by at most
// one row, and some are empty if there are fewer positions than chunks.
//
// Invariants (tested exhaustively): every position has exactly one rank and row; rows of a rank are
// in the order of their positions; ranks differ by at most one row.
#pragma once

#include <cstdint>

#include "schedule/ring.h"

namespace tandem::schedule {

enum class ContextSplit : uint8_t {
  balanced,    ///< head and tail chunks, for causal attention
  contiguous,  ///< one chunk per rank, as `split`; for attention without a mask
};

/// Positions of a rank's rows: those of the head, then those of the tail, which are later.
struct ContextRows {
  Range head, tail;

  constexpr int64_t count() const { return head.count + tail.count; }
  constexpr int64_t position(int64_t row) const {
    return row < head.count ? head.begin + row : tail.begin + row - head.count;
  }
  /// Number of rows with a position before `position`: the index of its row, if it is here.
  constexpr int64_t rows_before(int64_t position) const {
    return within(head, position) + within(tail, position);
  }

 private:
  static constexpr int64_t within(const Range& range, int64_t position) {
    if (position <= range.begin) return 0;
    return position < range.end() ? position - range.begin : range.count;
  }
};

/// Rows of `rank` of `ranks`, of a sequence of `seq` positions.
constexpr ContextRows context_rows(int64_t seq, int ranks, int rank,
                                   ContextSplit how = ContextSplit::balanced) {
  if (how == ContextSplit::contiguous) {
    const Range rows = split(seq, ranks, rank);
    return {rows, {rows.end(), 0}};
  }
  return {split(seq, 2 * ranks, rank), split(seq, 2 * ranks, 2 * ranks - 1 - rank)};
}

struct ContextOwner {
  int rank;
  int64_t row;
};
/// Rank and row of a position: the inverse of context_rows.
constexpr ContextOwner context_owner(int64_t seq, int ranks, int64_t position,
                                     ContextSplit how = ContextSplit::balanced) {
  const bool is_balanced = how == ContextSplit::balanced;
  const int chunk = owner_of(seq, is_balanced ? 2 * ranks : ranks, position);
  const int rank = chunk < ranks ? chunk : 2 * ranks - 1 - chunk;
  return {rank, context_rows(seq, ranks, rank, how).rows_before(position)};
}

/// Keys that a query reads.
struct ContextMask {
  bool causal = true;  ///< its own position and those before it; else all
  int64_t window = 0;  ///< if causal: at most so many; 0: all

  /// First position that the query at `position` may read.
  constexpr int64_t first_key(int64_t position) const {
    return window > 0 && position >= window ? position - window + 1 : 0;
  }
  constexpr bool reads(const Range& queries, const Range& keys) const {
    if (queries.count == 0 || keys.count == 0) return false;
    return !causal || (keys.begin < queries.end() && keys.end() > first_key(queries.begin));
  }
};

/// Queries of one rank and keys of another: chunks without a pair that is read are empty.
struct ContextBlock {
  ContextRows queries, keys;
  constexpr bool empty() const { return queries.count() == 0; }
};
constexpr ContextBlock context_block(const ContextRows& queries, const ContextRows& keys,
                                     const ContextMask& mask) {
  const auto if_read = [](const Range& range, bool keep) {
    return Range{range.begin, keep ? range.count : 0};
  };
  const bool hh = mask.reads(queries.head, keys.head), ht = mask.reads(queries.head, keys.tail);
  const bool th = mask.reads(queries.tail, keys.head), tt = mask.reads(queries.tail, keys.tail);
  return {{if_read(queries.head, hh || ht), if_read(queries.tail, th || tt)},
          {if_read(keys.head, hh || th), if_read(keys.tail, ht || tt)}};
}

/// Slice of a block: with the keys of one chunk.
constexpr ContextBlock context_block_slice(const ContextBlock& block, bool tail,
                                           const ContextMask& mask) {
  ContextRows keys = block.keys;
  (tail ? keys.head : keys.tail).count = 0;
  return context_block(block.queries, keys, mask);
}

}  // namespace tandem::schedule
