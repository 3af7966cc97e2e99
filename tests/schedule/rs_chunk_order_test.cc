#include "schedule/rs_chunk_order.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

namespace tandem::schedule {
namespace {

using TilePosition = std::tuple<int, int, int>;  // owner, row, column

TilePosition position_of(const ChunkTile& tile) {
  return {tile.owner, tile.row, tile.column};
}

std::vector<RsChunkOrder> orders() {
  std::vector<RsChunkOrder> all;
  for (const int ranks : {1, 2, 3, 4, 5, 8}) {
    // Chunks: 0 with local tiles after remote ones, -1 with local tiles interleaved, -2 with some
    // remote tiles sent later.
    for (const auto& [rows, band, columns, chunks] : {std::tuple{1, 1, 1, 1},
                                                      {2, 2, 3, 1},
                                                      {4, 2, 8, 4},
                                                      {3, 3, 32, 2},
                                                      {8, 8, 48, 4},
                                                      {16, 8, 32, 1},
                                                      {1, 1, 1, 0},
                                                      {4, 2, 7, 0},
                                                      {8, 4, 48, 0},
                                                      {1, 1, 1, -1},
                                                      {4, 1, 33, -1},
                                                      {8, 2, 32, -1},
                                                      {16, 4, 48, -1},
                                                      {1, 1, 1, -2},
                                                      {4, 2, 33, -2},
                                                      {3, 3, 66, -2},
                                                      {16, 8, 32, -2}}) {
      for (const int clusters : {1, 5, 64, 66}) {
        for (const int steps : {9, 32, 192}) {
          RsChunkOrder order;
          order.rank = ranks / 2;
          order.ranks = ranks;
          order.row_tiles = rows;
          order.column_tiles = columns;
          order.chunks = std::max(chunks, 0);
          order.band = band;
          order.local_band = chunks == 0 || chunks == -2 ? rows : band;
          order.clusters = std::min(clusters, order.tiles());
          order.last = chunks == -1 ? order.clusters : order.shard_tiles();
          order.later = chunks == -2 ? 6 : 0;
          order.steps = steps;
          order.added = 2 * (ranks - 1);
          order.minimum = 4;
          order.split = best_split(waves_of(order));
          all.push_back(order);
          if (chunks > 0 || chunks == -1 || ranks == 1 || rows == 1) continue;
          for (const int shorter : {1, ranks - 1}) {
            order.shorter = shorter;
            order.clusters = std::min(clusters, order.tiles());
            order.split = {};
            order.split = best_split(waves_of(order));
            all.push_back(order);
          }
        }
      }
    }
  }
  return all;
}

testing::Message about(const RsChunkOrder& o) {
  return testing::Message() << o.ranks << " ranks, " << o.row_tiles << " x " << o.column_tiles
                            << " tiles in " << o.chunks << " chunks, the last " << o.last
                            << ", one of " << o.later << " later, " << o.clusters << " clusters, "
                            << o.steps << " steps, split " << o.split.tiles << " "
                            << o.split.helpers << " " << o.split.begin << ", " << o.shorter
                            << " shorter shards";
}

TEST(RsChunkOrder, VisitsEveryTileOnce) {
  for (const RsChunkOrder& order : orders()) {
    SCOPED_TRACE(about(order));
    const std::vector<ChunkTile> tiles = tiles_of(order);
    ASSERT_EQ(int(tiles.size()), order.tiles());
    std::set<TilePosition> seen;
    for (const ChunkTile& tile : tiles) {
      ASSERT_TRUE(seen.insert(position_of(tile)).second);
      ASSERT_TRUE(tile.row >= 0 && tile.row < order.rows_of(tile.owner));
      ASSERT_TRUE(tile.column >= 0 && tile.column < order.column_tiles);
      ASSERT_EQ(tile.owner, rs_owner(order.rank, order.ranks, tile.step));
      ASSERT_EQ(tile.owner == order.rank, tile.step + 1 == order.ranks);
    }
  }
}

TEST(RsChunkOrder, ChunksAreConsecutiveAndTheLocalShardIsLast) {
  for (const RsChunkOrder& order : orders()) {
    if (order.chunks == 0) continue;
    SCOPED_TRACE(about(order));
    int before = 0;
    for (const ChunkTile& tile : tiles_of(order)) {
      ASSERT_EQ(tile.chunk, tile.column / order.chunk_columns());
      const int number = tile.step * order.chunks + tile.chunk;
      ASSERT_TRUE(number == before || number == before + 1);
      before = number;
    }
    ASSERT_EQ(before + 1, order.ranks * order.chunks);
  }
}

// A local tile adds what the other ranks, which have the same order, stored at the same position.
// Interleaved local tiles add nothing that was stored within the last `last` tiles.
TEST(RsChunkOrder, LocalTilesComeAfterRemoteTilesOfTheirPosition) {
  int between = 0;
  for (const RsChunkOrder& order : orders()) {
    if (order.chunks > 0 || order.ranks == 1) continue;
    SCOPED_TRACE(about(order));
    std::map<std::pair<int, int>, int> stored;  // position of the last one, by row and column in a
                                                // shard
    const std::vector<ChunkTile> tiles = tiles_of(order);
    const int end = order.tiles() - order.local_last();
    if (order.shorter > 0) {
      ASSERT_EQ(order.local_last(), order.local_tiles());
    }
    for (int at = 0; at < order.tiles(); ++at) {
      const ChunkTile& tile = tiles[size_t(at)];
      const std::pair position{tile.row, tile.column};
      if (tile.owner != order.rank) {
        ASSERT_LT(at, end);
        stored[position] = at;
      } else if (at < end) {
        ++between;
        ASSERT_GE(at - stored.at(position), order.last);
      } else {
        ASSERT_LT(stored.at(position), at);
      }
    }
    if (order.shorter > 0) continue;
    // Every owner gets its share of the bandwidth at any time.
    std::vector<int> of_owner(size_t(order.ranks));
    for (int at = 0; at < end; ++at) {
      ++of_owner[size_t(tiles[size_t(at)].owner)];
      for (int a = 0; a < order.ranks; ++a) {
        for (int b = 0; b < order.ranks; ++b) {
          if (a == order.rank || b == order.rank) continue;
          ASSERT_LE(of_owner[size_t(a)] - of_owner[size_t(b)], order.later > 0 ? 2 : 1);
        }
      }
    }
  }
  ASSERT_GT(between, 1000);
}

// Tiles sent later are those whose local tiles come last, in equal shares of all waves and
// clusters.
TEST(RsChunkOrder, TilesSentLaterAreNeededLastAndSpread) {
  int checked = 0;
  for (const RsChunkOrder& order : orders()) {
    if (order.shorter > 0) continue;
    SCOPED_TRACE(about(order));
    const std::vector<ChunkTile> tiles = tiles_of(order);
    const int all = int(std::ranges::count_if(tiles, [](const ChunkTile& t) { return t.later; }));
    const int num_later = order.later > 0 ? order.shard_tiles() / order.later : 0;
    ASSERT_EQ(all, num_later * (order.ranks - 1));
    if (all == 0) continue;
    std::set<std::pair<int, int>> last;
    for (int i = order.tiles() - num_later; i < order.tiles(); ++i) {
      last.insert({tiles[size_t(i)].row, tiles[size_t(i)].column});
    }
    std::vector<int> of_wave(size_t(order.tiles() / order.clusters + 1));
    std::vector<int> of_cluster(size_t(order.clusters));
    for (int at = 0; at < order.tiles(); ++at) {
      if (!tiles[size_t(at)].later) continue;
      ASSERT_NE(tiles[size_t(at)].owner, order.rank);
      ASSERT_TRUE(last.contains({tiles[size_t(at)].row, tiles[size_t(at)].column}));
      ++of_wave[size_t(at / order.clusters)];
      ++of_cluster[size_t(at % order.clusters)];
    }
    const auto [few, maximum] = std::ranges::minmax(of_cluster);
    ASSERT_LE(maximum - few, 2);
    const int share = order.clusters / order.later;
    ASSERT_LE(std::ranges::max(of_wave), share + 2);
    // The last wave of remote tiles may have the remainder of either kind.
    const int waves = (order.tiles() - order.shard_tiles()) / order.clusters;
    for (int wave = 0; wave + 1 < waves; ++wave) ASSERT_GE(of_wave[size_t(wave)], share);
    ++checked;
  }
  ASSERT_GT(checked, 20);
}

TEST(RsChunkOrder, OnlyLocalTilesAreSplit) {
  int count = 0;
  for (const RsChunkOrder& order : orders()) {
    SCOPED_TRACE(about(order));
    const RsChunks chunks(order);
    for (int cluster = 0; cluster < order.clusters; ++cluster) {
      for (int i = 0;; ++i) {
        const ChunkWork work = work_at(chunks, cluster, i);
        if (work.end == 0) break;
        ASSERT_GE(work.end - work.begin, order.minimum);
        if (work.begin == 0 && work.end == order.steps) continue;
        ASSERT_EQ(work.tile.owner, order.rank);
        ++count;
      }
    }
  }
  ASSERT_GT(count, 5);
}

TEST(RsChunkOrder, SplitShortensTheLastWave) {
  RsChunkOrder order;
  order.ranks = 4;
  order.row_tiles = 8;
  order.column_tiles = 48;
  order.clusters = 66;
  order.steps = 192;
  order.added = 6;
  order.minimum = 4;
  ASSERT_EQ(waves_of(order).rest, 18);
  order.split = best_split(waves_of(order));
  ASSERT_EQ(order.split.tiles, 1);
  ASSERT_EQ(order.split.helpers, 2);  // 18 tiles by 54 clusters
  ASSERT_LT(order.split.begin, 80);
  order.clusters = 64;
  ASSERT_EQ(waves_of(order).rest, 0);
  ASSERT_EQ(best_split(waves_of(order)).tiles, 0);
}

}  // namespace
}  // namespace tandem::schedule
