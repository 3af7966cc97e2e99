#include "schedule/context.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace tandem::schedule {
namespace {

static_assert(context_rows(16, 2, 0).head.begin == 0 && context_rows(16, 2, 0).tail.begin == 12);
static_assert(context_rows(16, 2, 1).position(4) == 8 && context_rows(16, 2, 1).count() == 8);
static_assert(context_owner(16, 2, 13).rank == 0 && context_owner(16, 2, 13).row == 5);
static_assert(context_rows(16, 4, 1, ContextSplit::contiguous).head.begin == 4);

constexpr ContextSplit kSplits[] = {ContextSplit::balanced, ContextSplit::contiguous};

TEST(ContextRows, EveryPositionHasOneRankAndRowInOrder) {
  for (const ContextSplit how : kSplits) {
    for (int ranks = 1; ranks <= 8; ++ranks) {
      for (int64_t seq = 1; seq <= 50; ++seq) {
        std::vector<int> seen(size_t(seq), 0);
        int64_t min_count = seq, max_count = 0;
        for (int rank = 0; rank < ranks; ++rank) {
          const ContextRows rows = context_rows(seq, ranks, rank, how);
          min_count = std::min(min_count, rows.count());
          max_count = std::max(max_count, rows.count());
          int64_t last = -1;
          for (int64_t row = 0; row < rows.count(); ++row) {
            const int64_t p = rows.position(row);
            ASSERT_GT(p, last);
            last = p;
            ++seen[size_t(p)];
            const ContextOwner owner = context_owner(seq, ranks, p, how);
            ASSERT_EQ(owner.rank, rank);
            ASSERT_EQ(owner.row, row);
            ASSERT_EQ(rows.rows_before(p), row);
            ASSERT_EQ(rows.rows_before(p + 1), row + 1);
          }
          ASSERT_EQ(rows.rows_before(seq), rows.count());
        }
        ASSERT_LE(max_count - min_count, 1);
        for (const int count : seen) ASSERT_EQ(count, 1);
      }
    }
  }
}

TEST(ContextRows, OneRankHasTheSequenceInItsOrder) {
  for (int64_t seq = 1; seq < 20; ++seq) {
    const ContextRows rows = context_rows(seq, 1, 0);
    for (int64_t p = 0; p < seq; ++p) ASSERT_EQ(rows.position(p), p);
  }
}

/// Pairs of a query and a key in a block, one by one.
int64_t pairs(const ContextRows& queries, const ContextRows& keys, const ContextMask& mask) {
  int64_t count = 0;
  for (int64_t i = 0; i < queries.count(); ++i) {
    for (int64_t j = 0; j < keys.count(); ++j) {
      const int64_t q = queries.position(i), k = keys.position(j);
      count += !mask.causal || (k <= q && (mask.window == 0 || k > q - mask.window));
    }
  }
  return count;
}

TEST(ContextBlock, HasExactlyTheChunksWithPairs) {
  for (const ContextMask& mask : {ContextMask{}, ContextMask{true, 1}, ContextMask{true, 3},
                                  ContextMask{true, 9}, ContextMask{false}}) {
    for (int ranks = 1; ranks <= 5; ++ranks) {
      for (int64_t seq = 1; seq <= 24; ++seq) {
        for (int q = 0; q < ranks; ++q) {
          for (int k = 0; k < ranks; ++k) {
            const ContextRows queries = context_rows(seq, ranks, q),
                              keys = context_rows(seq, ranks, k);
            const ContextBlock block = context_block(queries, keys, mask);
            ASSERT_EQ(pairs(block.queries, block.keys, mask), pairs(queries, keys, mask));
            ASSERT_EQ(block.empty(), pairs(queries, keys, mask) == 0);
            const Range none{0, 0};
            for (const Range& chunk : {block.queries.head, block.queries.tail}) {
              ASSERT_TRUE(chunk.count == 0 || pairs({chunk, none}, keys, mask) > 0);
            }
            for (const Range& chunk : {block.keys.head, block.keys.tail}) {
              ASSERT_TRUE(chunk.count == 0 || pairs(queries, {chunk, none}, mask) > 0);
            }
          }
        }
      }
    }
  }
}

TEST(ContextBlock, EveryPairOfRanksHasTheSameWork) {
  for (int ranks = 2; ranks <= 6; ++ranks) {
    const int64_t chunk = 4, seq = 2 * ranks * chunk;
    for (int q = 0; q < ranks; ++q) {
      for (int k = 0; k < ranks; ++k) {
        const int64_t expected = q == k ? 2 * chunk * chunk + chunk : 2 * chunk * chunk;
        ASSERT_EQ(pairs(context_rows(seq, ranks, q), context_rows(seq, ranks, k), {}), expected);
      }
    }
  }
}

/// Pairs of the rank with most of them.
int64_t max_pairs(int64_t seq, int ranks, ContextSplit how) {
  int64_t maximum = 0;
  for (int q = 0; q < ranks; ++q) {
    int64_t count = 0;
    for (int k = 0; k < ranks; ++k) {
      count += pairs(context_rows(seq, ranks, q, how), context_rows(seq, ranks, k, how), {});
    }
    maximum = std::max(maximum, count);
  }
  return maximum;
}

TEST(ContextRows, ContiguousOnesGiveTheLastRankHalfAsMuchAgain) {
  const int64_t balanced = max_pairs(64, 2, ContextSplit::balanced),
                contiguous = max_pairs(64, 2, ContextSplit::contiguous);
  EXPECT_EQ(balanced, 64 * 65 / 4);
  EXPECT_GE(double(contiguous), 1.4 * double(balanced));
}

}  // namespace
}  // namespace tandem::schedule
