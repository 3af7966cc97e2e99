#include "schedule/rs_tile_order.h"

#include <gtest/gtest.h>

#include <map>
#include <utility>
#include <vector>

namespace tandem::schedule {
namespace {

// Positions by tile; fails when a tile is missing or comes twice.
std::map<std::pair<int, int>, int> positions(const RsTileOrder& order) {
  std::map<std::pair<int, int>, int> found;
  for (int at = 0; at < int(order.tiles()); ++at) {
    const Tile tile = tile_at(order, at);
    EXPECT_TRUE(tile.row >= 0 && tile.row < order.ranks * order.shard_tiles);
    EXPECT_TRUE(tile.column >= 0 && tile.column < order.column_tiles);
    EXPECT_TRUE(found.insert({{tile.row, tile.column}, at}).second);
  }
  return found;
}

TEST(RsTileOrder, EveryTileOnceAndPeersSendBeforeTheOwnerSums) {
  for (int ranks = 1; ranks <= 5; ++ranks) {
    for (const auto& [shard_tiles, band] : {std::pair{1, 1}, {2, 1}, {2, 2}, {6, 3}}) {
      for (int columns = 1; columns <= 4; ++columns) {
        const int groups = RsTileOrder{0, ranks, shard_tiles, columns, band, 0}.groups();
        for (int lag = 0; lag <= groups; ++lag) {
          std::vector<std::map<std::pair<int, int>, int>> of_rank;
          for (int rank = 0; rank < ranks; ++rank) {
            of_rank.push_back(positions({rank, ranks, shard_tiles, columns, band, lag}));
            ASSERT_EQ(int(of_rank.back().size()), ranks * shard_tiles * columns);
          }
          for (int row = 0; row < ranks * shard_tiles; ++row) {
            for (int column = 0; column < columns; ++column) {
              const int owner = row / shard_tiles;
              const int sums = of_rank[size_t(owner)].at({row, column});
              for (int rank = 0; rank < ranks; ++rank) {
                if (rank == owner) continue;
                const int sends = of_rank[size_t(rank)].at({row, column});
                ASSERT_GT(sums, sends);
                if (lag < groups) {
                  ASSERT_GE(sums - sends, lag * band);
                }
              }
            }
          }
        }
      }
    }
  }
}

TEST(RsTileOrder, WithTheLongestLagAllOwnTilesComeLast) {
  for (int rank = 0; rank < 3; ++rank) {
    RsTileOrder order{rank, 3, 4, 5, 2, 0};
    order.lag = order.groups();
    for (int at = 0; at < int(order.tiles()); ++at) {
      const bool own = tile_at(order, at).row / order.shard_tiles == rank;
      ASSERT_EQ(own, at >= int(order.tiles()) * 2 / 3) << at;
    }
  }
}

static_assert(tile_at({0, 2, 1, 2, 1, 1}, 0) == Tile{1, 0});
static_assert(tile_at({0, 2, 1, 2, 1, 1}, 1) == Tile{1, 1});
static_assert(tile_at({0, 2, 1, 2, 1, 1}, 2) == Tile{0, 0});
static_assert(tile_at({0, 2, 1, 2, 1, 1}, 3) == Tile{0, 1});

}  // namespace
}  // namespace tandem::schedule
