#include "schedule/ag_wave_order.h"

#include <gtest/gtest.h>

#include <set>
#include <utility>
#include <vector>

#include "schedule/ring.h"

namespace tandem::schedule {
namespace {

std::vector<AgWaveOrder> orders() {
  std::vector<AgWaveOrder> all;
  for (const int ranks : {1, 2, 3, 4, 8}) {
    for (const auto& [shard_tiles, columns] :
         {std::pair{1, 1}, {1, 10}, {2, 3}, {4, 10}, {6, 48}, {16, 56}}) {
      for (const int clusters : {1, 5, 66}) {
        for (const int steps : {9, 32, 128, 192}) {
          for (const int eighths : {0, 4, 8}) {
            AgWaveOrder order;
            order.rows = {ranks / 2, ranks, shard_tiles, columns, (columns * eighths + 7) / 8};
            if (!has_pairs_of_rows(order.rows)) continue;
            const int rows = in_pairs_of_rows(order.rows).shard_tiles;
            order.band = rows % 2 == 0 ? rows / 2 : rows;
            order.clusters = clusters;
            order.steps = steps;
            order.minimum = 8;
            for (const int shorter : {0, 1, ranks - 1}) {
              if (shorter > 0 && rows == 1) continue;
              order.shorter = shorter;
              order.split = {};
              order.split = best_split(waves_of(order));
              all.push_back(order);
            }
          }
        }
      }
    }
  }
  return all;
}

testing::Message about(const AgWaveOrder& o) {
  return testing::Message() << o.rows.ranks << " ranks, shards of " << o.rows.shard_tiles << " x "
                            << o.rows.column_tiles << " tiles, head " << o.rows.head << ", "
                            << o.clusters << " clusters, " << o.steps << " steps, split "
                            << o.split.tiles << " " << o.split.helpers << " " << o.split.begin
                            << ", " << o.shorter << " shorter shards";
}

TEST(AgWaveOrder, WorkItemsArePairsOfRowsWithTheirShard) {
  for (const AgWaveOrder& order : orders()) {
    SCOPED_TRACE(about(order));
    const int shard_tiles = order.rows.shard_tiles;
    for (int cluster = 0; cluster < order.clusters; ++cluster) {
      for (int i = 0;; ++i) {
        const AgWork work = work_at(order, cluster, i);
        if (work.end == 0) break;
        ASSERT_TRUE(work.row >= 0 && work.row + 1 < order.rows.row_tiles());
        ASSERT_TRUE(work.column >= 0 && work.column < order.rows.column_tiles);
        ASSERT_EQ(work.row % 2, 0);
        ASSERT_EQ(work.shard, work.row / shard_tiles);
        // Shard that the kernel assumes for the second block's rows.
        ASSERT_EQ((work.row + 1) / shard_tiles, work.shard + (shard_tiles == 1 ? 1 : 0));
      }
    }
  }
}

TEST(AgWaveOrder, EveryPairOfTilesHasOnePosition) {
  for (const AgWaveOrder& order : orders()) {
    SCOPED_TRACE(about(order));
    std::set<std::pair<int, int>> seen;
    for (int at = 0; at < waves_of(order).tiles; ++at) {
      const Tile tile = pair_at(order, at);
      ASSERT_TRUE(seen.insert({tile.row, tile.column}).second);
      const AgTileOrder pairs = in_pairs_of_rows(order.rows);
      ASSERT_TRUE(tile.column >= 0 && tile.column < pairs.column_tiles);
      ASSERT_LT(tile.row % pairs.shard_tiles, pairs_of_shard(order, tile.row / pairs.shard_tiles));
    }
  }
}

TEST(AgWaveOrder, BandsAndShardsAreSweptOneAfterAnother) {
  for (const AgWaveOrder& order : orders()) {
    const AgTileOrder pairs = in_pairs_of_rows(order.rows);
    if (pairs.head < pairs.column_tiles || order.shorter > 0) continue;
    SCOPED_TRACE(about(order));
    const int of_band = order.band * pairs.column_tiles;
    for (int at = 0; at < int(pairs.tiles()); ++at) {
      const Tile tile = pair_at(order, at), first = pair_at(order, at / of_band * of_band);
      ASSERT_EQ(shard_of_row(pairs, tile.row),
                ag_source(pairs.rank, pairs.ranks, at / (pairs.shard_tiles * pairs.column_tiles)));
      ASSERT_TRUE(tile.row >= first.row && tile.row < first.row + order.band);
      ASSERT_EQ(tile.column, at % of_band / order.band);
    }
  }
}

// Without local-first tiles: shards in ring order, each contiguous, as with equal row counts.
TEST(AgWaveOrder, ShorterShardsComeInTheSameOrder) {
  for (const AgWaveOrder& order : orders()) {
    const AgTileOrder pairs = in_pairs_of_rows(order.rows);
    if (pairs.head < pairs.column_tiles || order.shorter == 0) continue;
    SCOPED_TRACE(about(order));
    AgWaveOrder uniform = order;
    uniform.shorter = 0;
    std::vector<std::pair<int, int>> shards, of_uniform;
    const auto add = [&](const AgWaveOrder& from, int at, auto& to) {
      const Tile tile = pair_at(from, at);
      const int shard = tile.row / pairs.shard_tiles;
      if (tile.row % pairs.shard_tiles >= pairs_of_shard(order, shard)) return;
      to.emplace_back(shard, tile.row % pairs.shard_tiles / order.band);
    };
    for (int at = 0; at < waves_of(order).tiles; ++at) add(order, at, shards);
    for (int at = 0; at < waves_of(uniform).tiles; ++at) add(uniform, at, of_uniform);
    ASSERT_EQ(shards, of_uniform);
  }
}

// Mirrors the kernel's loading threads: every other work item goes backwards, if its rows have
// arrived.
TEST(AgWaveOrder, BothBlocksOfAClusterTraverseKInTheSameDirection) {
  int backwards = 0, unlike = 0;
  for (const AgWaveOrder& order : orders()) {
    SCOPED_TRACE(about(order));
    const int tiles = order.rows.shard_tiles;
    for (int cluster = 0; cluster < order.clusters; ++cluster) {
      unsigned here[2] = {};
      bool turned = false;
      for (int i = 0;; ++i, turned = !turned) {
        const AgWork work = work_at(order, cluster, i);
        if (work.end == 0) break;
        bool arrived[2], back[2];
        for (int block = 0; block < 2; ++block) {
          const int shard = (work.row + block) / tiles;
          arrived[block] = shard == order.rows.rank || (here[block] >> shard & 1) != 0;
          back[block] = turned && arrived[block] && may_go_backwards(tiles);
          if (work.begin == 0 && work.end == order.steps) here[block] |= 1u << shard;
        }
        ASSERT_EQ(back[0], back[1]);
        backwards += back[0] ? 1 : 0;
        unlike += turned && arrived[0] != arrived[1] ? 1 : 0;
      }
    }
  }
  ASSERT_GT(backwards, 100);
  ASSERT_GT(unlike, 0);  // such work items exist: the rule is needed
}

TEST(AgWaveOrder, FewTilesAreSplitAmongAllClusters) {
  AgWaveOrder order;
  order.rows = {0, 4, 1, 10, 0};
  order.clusters = 66;
  order.steps = 128;
  order.minimum = 8;
  const WaveSplit split = best_split(waves_of(order));  // 20 tiles
  ASSERT_EQ(split.tiles, 1);
  ASSERT_EQ(split.helpers, 2);
  ASSERT_LT(split.begin, 60);
}

}  // namespace
}  // namespace tandem::schedule
