#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <vector>

#include "schedule/ring.h"
#include "tandem/collectives.h"

namespace tandem::schedule {
namespace {

static_assert(ag_source(2, 4, 3) == 1 && ag_target(2, 4, 3) == 3);
static_assert(rs_owner(2, 4, 3) == 2 && rs_source(0, 4, 0) == 3);
static_assert(split(10, 4, 1).begin == 3 && owner_of(10, 4, 3) == 1);
static_assert(chunk_rows(16, 2, 1, 3, 0, Taper::falling).end() == 12);
static_assert(chunk_rows(16, 2, 1, 3, 0, Taper::rising).end() == 10);
static_assert(chunk_of_row(16, 2, 3, 8, Taper::falling) == 3);
static_assert(ar_rows(8, 2, 2, 1, 1).begin == 6);
static_assert(ar_rows_before(8, 2, 2, 1, 1) == 2 && ar_rows_bound(8, 2, 4) >= 4);

constexpr int64_t kRows[] = {0, 1, 2, 3, 5, 7, 8, 13, 16, 31, 64, 97, 128, 129};
constexpr int kChunks[] = {1, 2, 3, 4, 8};
constexpr Taper kTapers[] = {Taper::falling, Taper::rising};

TEST(Split, CoversEachElementOnceAndMatchesShardOf) {
  for (int num_shards = 1; num_shards <= 9; ++num_shards) {
    for (int64_t total = 0; total < 50; ++total) {
      int64_t next = 0;
      for (int i = 0; i < num_shards; ++i) {
        const Range range = split(total, num_shards, i);
        const Shard shard = shard_of(total, num_shards, i);
        ASSERT_EQ(range.begin, next);
        ASSERT_EQ(range.begin, shard.begin);
        ASSERT_EQ(range.count, shard.count);
        for (int64_t row = range.begin; row < range.end(); ++row) {
          ASSERT_EQ(owner_of(total, num_shards, row), i);
        }
        next = range.end();
      }
      ASSERT_EQ(next, total);
    }
  }
}

TEST(Ring, NoTwoRanksSendToOnePeerAtOneStep) {
  for (int world = 1; world <= 8; ++world) {
    for (int step = 0; step < world; ++step) {
      std::set<int> ag, rs;
      for (int rank = 0; rank < world; ++rank) {
        const int target = ag_target(rank, world, step);
        ASSERT_EQ(ag_source(target, world, step), rank);
        ag.insert(target);
        const int owner = rs_owner(rank, world, step);
        rs.insert(owner);
        if (step + 1 < world) {
          ASSERT_NE(owner, rank);
          ASSERT_EQ(rs_source(owner, world, step), rank);
        } else {
          ASSERT_EQ(owner, rank);
        }
      }
      ASSERT_EQ(int(ag.size()), world);
      ASSERT_EQ(int(rs.size()), world);
    }
    for (int rank = 0; rank < world; ++rank) {
      std::set<int> sources, owners;
      for (int step = 0; step < world; ++step) {
        sources.insert(ag_source(rank, world, step));
        owners.insert(rs_owner(rank, world, step));
      }
      ASSERT_EQ(int(sources.size()), world);
      ASSERT_EQ(int(owners.size()), world);
      ASSERT_EQ(ag_source(rank, world, 0), rank);
    }
  }
}

TEST(Chunks, CoverEveryRowOnce) {
  for (int world = 1; world <= 8; ++world) {
    for (const int64_t m : kRows) {
      for (const int chunks : kChunks) {
        for (const Taper taper : kTapers) {
          int64_t next = 0;
          for (int owner = 0; owner < world; ++owner) {
            for (int chunk = 0; chunk < chunks; ++chunk) {
              const Range rows = chunk_rows(m, world, owner, chunks, chunk, taper);
              ASSERT_EQ(rows.begin, next);
              next = rows.end();
              for (int64_t row = rows.begin; row < rows.end(); ++row) {
                ASSERT_EQ(chunk_of_row(m, world, chunks, row, taper),
                          chunk_id(owner, chunks, chunk));
              }
            }
          }
          ASSERT_EQ(next, m);
        }
      }
    }
  }
}

TEST(Chunks, SizesHalveOrDouble) {
  for (const int64_t rows : {16, 64, 1024, 4096}) {
    for (int chunks = 1; chunks <= 5; ++chunks) {
      for (int chunk = 0; chunk < chunks; ++chunk) {
        const int64_t expected = rows >> std::min(chunk + 1, chunks - 1);
        ASSERT_EQ(taper_rows(rows, chunks, chunk, Taper::falling).count, expected);
        ASSERT_EQ(taper_rows(rows, chunks, chunks - 1 - chunk, Taper::rising).count, expected);
      }
    }
  }
}

TEST(ArPanels, CoverEveryRowOnceWithinTheBound) {
  for (int world = 1; world <= 8; ++world) {
    for (const int64_t m : kRows) {
      for (const int panels : kChunks) {
        int64_t next = 0;
        std::vector<int64_t> owned(size_t(world), 0);
        for (int panel = 0; panel < panels; ++panel) {
          for (int owner = 0; owner < world; ++owner) {
            const Range rows = ar_rows(m, world, panels, panel, owner);
            ASSERT_EQ(rows.begin, next);
            ASSERT_EQ(ar_rows_before(m, world, panels, panel, owner), owned[size_t(owner)]);
            owned[size_t(owner)] += rows.count;
            next = rows.end();
          }
        }
        ASSERT_EQ(next, m);
        for (const int64_t rows : owned) ASSERT_LE(rows, ar_rows_bound(m, world, panels));
      }
    }
  }
}

}  // namespace
}  // namespace tandem::schedule
