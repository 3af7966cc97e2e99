#include "schedule/rs_tile_order.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <utility>

namespace tandem::schedule {
namespace {

// Positions by tile; fails if a tile is missing or visited twice.
std::map<std::pair<int, int>, int> positions(const RsTileOrder& order) {
  std::map<std::pair<int, int>, int> found;
  for (int at = 0; at < int(order.tiles()); ++at) {
    const Tile tile = tile_at(order, at);
    EXPECT_TRUE(tile.row >= 0 && tile.row < order.ranks * order.shard_tiles);
    EXPECT_TRUE(tile.column >= 0 && tile.column < order.column_tiles);
    EXPECT_TRUE(found.insert({{tile.row, tile.column}, at}).second);
  }
  EXPECT_EQ(int64_t(found.size()), order.tiles());
  return found;
}

// Calls `check` for every combination of few ranks, rows, columns and bands, on every rank.
template <typename Check>
void for_every_order(const Check& check) {
  for (int ranks = 1; ranks <= 5; ++ranks) {
    for (const int shard_tiles : {1, 2, 3, 6}) {
      for (int columns = 1; columns <= 4; ++columns) {
        for (int band = 1; band <= shard_tiles; ++band) {
          for (int local_band = 1; local_band <= shard_tiles; ++local_band) {
            if (shard_tiles % band != 0 || shard_tiles % local_band != 0) continue;
            for (int rank = 0; rank < ranks; ++rank) {
              check(RsTileOrder{rank, ranks, shard_tiles, columns, band, local_band});
            }
          }
        }
      }
    }
  }
}

TEST(RsTileOrder, VisitsEveryTileOnceAndLocalOnesLast) {
  for_every_order([](const RsTileOrder& order) {
    const int remote = (order.ranks - 1) * order.shard_tiles * order.column_tiles;
    for (const auto& [tile, at] : positions(order)) {
      ASSERT_EQ(tile.first / order.shard_tiles == order.rank, at >= remote);
    }
  });
}

// One column of a band at a time, so that few rows and columns are in use concurrently.
TEST(RsTileOrder, ConsecutiveTilesAreInOneColumnOfABand) {
  for_every_order([](const RsTileOrder& order) {
    const int tiles = int(order.tiles()), remote = tiles / order.ranks * (order.ranks - 1);
    for (int at = 0; at < tiles;) {
      const int band = at < remote ? order.band : order.local_band;
      const int length = at < remote ? (order.ranks - 1) * band : band;
      const Tile first = tile_at(order, at);
      for (int i = 0; i < length; ++i) {
        const Tile tile = tile_at(order, at + i);
        ASSERT_EQ(tile.column, first.column);
        ASSERT_EQ(tile.row % order.shard_tiles / band, first.row % order.shard_tiles / band);
      }
      at += length;
      if (at == tiles || at == remote) continue;
      const Tile next = tile_at(order, at);
      ASSERT_EQ(next.column, (first.column + 1) % order.column_tiles);
    }
  });
}

// Each remote rank owns the same number of tiles in any range of whole columns.
TEST(RsTileOrder, OwnersAlternateInRingOrderWithinEachColumn) {
  for_every_order([](const RsTileOrder& order) {
    const int remote = (order.ranks - 1) * order.shard_tiles * order.column_tiles;
    for (int at = 0; at < remote; ++at) {
      const int owner = tile_at(order, at).row / order.shard_tiles;
      const int step = at / order.band % (order.ranks - 1);
      ASSERT_EQ(owner, (order.rank + 1 + step) % order.ranks) << at;
    }
  });
}

TEST(RsTileOrder, LocalTilesAreAddedInTheColumnOrderOfTheirSends) {
  for_every_order([](const RsTileOrder& order) {
    if (order.ranks == 1) return;
    RsTileOrder peer = order;
    peer.rank = (order.rank + 1) % order.ranks;
    const auto added = positions(order), sent = positions(peer);
    const int first = order.rank * order.shard_tiles;
    for (int row = first; row < first + order.shard_tiles; ++row) {
      for (int column = 1; column < order.column_tiles; ++column) {
        ASSERT_LT(added.at({row, column - 1}), added.at({row, column}));
        ASSERT_LT(sent.at({row, column - 1}), sent.at({row, column}));
      }
    }
  });
}

TEST(RsTileOrder, LastPositionIsTheLastAtThatStride) {
  for_every_order([](const RsTileOrder& order) {
    const int tiles = int(order.tiles());
    for (const int step : {1, 2, 5, 66}) {
      for (int first = 0; first < std::min(step, tiles); ++first) {
        int last = first;
        while (last + step < tiles) last += step;
        ASSERT_EQ(last_position(order, first, step), last) << first << " of " << step;
      }
    }
  });
}

static_assert(tile_at({0, 2, 1, 2, 1, 1}, 0) == Tile{1, 0});
static_assert(tile_at({0, 2, 1, 2, 1, 1}, 1) == Tile{1, 1});
static_assert(tile_at({0, 2, 1, 2, 1, 1}, 2) == Tile{0, 0});
static_assert(tile_at({0, 2, 1, 2, 1, 1}, 3) == Tile{0, 1});
// Rows 2 and 3 of a shard follow after its first two, except in the local shard.
static_assert(tile_at({1, 2, 4, 2, 2, 4}, 4) == Tile{2, 0});
static_assert(tile_at({1, 2, 4, 2, 2, 4}, 11) == Tile{7, 0});

}  // namespace
}  // namespace tandem::schedule
