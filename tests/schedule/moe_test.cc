#include "schedule/moe.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <vector>

namespace tandem::schedule {
namespace {

TEST(MoeSchedule, EveryExpertIsOnOneRank) {
  for (int ep = 1; ep <= 8; ++ep) {
    for (int tp = 1; tp <= 4; ++tp) {
      for (int each = 1; each <= 5; ++each) {
        const MoeGrid grid{ep * each, ep, tp};
        std::vector<int> holders(size_t(grid.experts));
        for (int rank = 0; rank < grid.world(); ++rank) {
          const Range local = grid.local(rank);
          EXPECT_EQ(local.count, each);
          for (int64_t e = local.begin; e < local.end(); ++e) {
            EXPECT_EQ(grid.holder(int(e)), rank / tp * tp);
            ++holders[size_t(e)];
          }
        }
        for (const int count : holders) EXPECT_EQ(count, tp);
      }
    }
  }
}

TEST(MoeSchedule, StepsReachEveryRankOnceAndTargetsMirrorSources) {
  for (int world = 1; world <= 9; ++world) {
    for (int step = 0; step < world; ++step) {
      std::set<int> targets;
      for (int rank = 0; rank < world; ++rank) {
        const int to = moe_target(rank, world, step);
        EXPECT_EQ(moe_source(to, world, step), rank);
        targets.insert(to);
      }
      EXPECT_EQ(targets.size(), size_t(world));
    }
  }
}

TEST(MoeSchedule, WavesAreContiguousAndCoverAllRows) {
  for (int64_t rows = 0; rows <= 130; ++rows) {
    std::vector<int> chunk;
    for (int64_t row = 0; row < rows; ++row) chunk.push_back(moe_wave_of(rows, row));
    EXPECT_TRUE(std::ranges::is_sorted(chunk));
    for (int waves = 1; waves <= kMaxMoeWaves; ++waves) {
      int64_t next = 0, next_wave = 0;
      for (int wave = 0; wave < waves; ++wave) {
        const Range shard = moe_wave(rows, waves, wave),
                    chunk_waves = moe_waves_of_chunk(waves, wave);
        EXPECT_EQ(shard.begin, next);
        EXPECT_EQ(chunk_waves.begin, next_wave);
        next = shard.end();
        next_wave = chunk_waves.end();
        for (int64_t row = shard.begin; row < shard.end(); ++row) {
          EXPECT_GE(chunk[size_t(row)], chunk_waves.begin);
          EXPECT_LT(chunk[size_t(row)], chunk_waves.end());
        }
      }
      EXPECT_EQ(next, rows);
      EXPECT_EQ(next_wave, kMaxMoeWaves);
    }
  }
}

TEST(MoeSchedule, ColumnGroupsCoverAllColumnsBetweenBlocks) {
  for (int64_t columns = 1; columns <= 700; columns += columns < 70 ? 1 : 37) {
    for (int groups = 1; groups <= 16; ++groups) {
      int64_t next = 0;
      for (int group = 0; group < groups; ++group) {
        const Range shard = moe_columns(columns, groups, group);
        EXPECT_EQ(shard.begin, next);
        EXPECT_GE(shard.count, 0);
        EXPECT_TRUE(shard.begin % kMoeColumns == 0 || shard.count == 0);
        next = shard.end();
      }
      EXPECT_EQ(next, columns);
    }
  }
}

static_assert(moe_columns(4096, 4, 0).count == 512);
static_assert(MoeGrid{8, 2, 2}.holder(5) == 2);

TEST(MoeSchedule, ImbalanceIsThatOfTheFullestRank) {
  constexpr int64_t even[] = {3, 3, 3, 3}, one[] = {0, 8, 0, 0}, none[] = {0, 0};
  static_assert(moe_imbalance(even, 4) == 1);
  static_assert(moe_imbalance(one, 4) == 4);
  static_assert(moe_imbalance(none, 2) == 1);
  constexpr int64_t some[] = {1, 3};
  static_assert(moe_imbalance(some, 2) == 1.5);
}

TEST(MoeSchedule, CallsUseTheLevelNearestToTheirImbalance) {
  for (int ep = 1; ep <= 9; ++ep) {
    for (int each = 1; each <= 4; ++each) {
      const MoeGrid grid{ep * each, ep, 1};
      for (int top_k = 1; top_k <= grid.experts; ++top_k) {
        const int levels = moe_levels(grid, top_k);
        const double maximum = moe_max_imbalance(grid, top_k);
        // A row sends one rank at most as many of its top_k choices as the rank has experts.
        EXPECT_EQ(maximum, double(std::min(each, top_k)) * ep / top_k);
        EXPECT_EQ(moe_level_imbalance(grid, top_k, 0), 1);
        EXPECT_EQ(moe_level_imbalance(grid, top_k, levels - 1), maximum);
        for (int level = 0; level < levels; ++level) {
          EXPECT_EQ(moe_level(grid, top_k, moe_level_imbalance(grid, top_k, level)), level);
          if (level > 0) {
            EXPECT_GT(moe_level_imbalance(grid, top_k, level),
                      moe_level_imbalance(grid, top_k, level - 1));
          }
        }
        for (double x = 1; x < maximum; x += 0.01) {
          const int taken = moe_level(grid, top_k, x);
          const auto distance = [&](int level) {
            return std::abs(std::log(moe_level_imbalance(grid, top_k, level) / x));
          };
          for (int level = 0; level < levels; ++level) {
            EXPECT_LE(distance(taken), distance(level) + 1e-12);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace tandem::schedule
