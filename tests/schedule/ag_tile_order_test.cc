#include "schedule/ag_tile_order.h"

#include <gtest/gtest.h>

#include <set>
#include <utility>

#include "schedule/ring.h"

namespace tandem::schedule {
namespace {

TEST(AgTileOrder, VisitsEveryTileOnceLocalFirstAndShardsInRingOrder) {
  for (int ranks = 1; ranks <= 8; ++ranks) {
    for (int rank = 0; rank < ranks; ++rank) {
      for (int shard_tiles = 1; shard_tiles <= 3; ++shard_tiles) {
        for (int columns = 1; columns <= 5; ++columns) {
          for (int head = 0; head <= columns; ++head) {
            const AgTileOrder order{rank, ranks, shard_tiles, columns, head};
            std::set<std::pair<int, int>> seen;
            int last_step = 0;
            for (int at = 0; at < int(order.tiles()); ++at) {
              const Tile tile = tile_at(order, at);
              ASSERT_TRUE(tile.row >= 0 && tile.row < order.row_tiles());
              ASSERT_TRUE(tile.column >= 0 && tile.column < columns);
              ASSERT_TRUE(seen.insert({tile.row, tile.column}).second);
              const int shard = shard_of_row(order, tile.row);
              if (at < shard_tiles * head) {
                ASSERT_EQ(shard, rank);
              }
              if (head == columns) {
                const int step = (shard - rank + ranks) % ranks;
                ASSERT_GE(step, last_step);
                ASSERT_EQ(ag_source(rank, ranks, step), shard);
                last_step = step;
              }
            }
            ASSERT_EQ(int64_t(seen.size()), order.tiles());
          }
        }
      }
    }
  }
}

TEST(AgTileOrder, PairsOfRowsCoverAllRowsAndBeginWithLocalOnes) {
  for (int ranks = 1; ranks <= 8; ++ranks) {
    for (int rank = 0; rank < ranks; ++rank) {
      for (int shard_tiles = 1; shard_tiles <= 6; ++shard_tiles) {
        const AgTileOrder order{rank, ranks, shard_tiles, 3, 1};
        ASSERT_EQ(has_pairs_of_rows(order),
                  shard_tiles % 2 == 0 || (shard_tiles == 1 && ranks % 2 == 0));
        if (!has_pairs_of_rows(order)) continue;
        const AgTileOrder pairs = in_pairs_of_rows(order);
        ASSERT_EQ(2 * pairs.row_tiles(), order.row_tiles());
        const int first = 2 * tile_at(pairs, 0).row;  // of the pair's two rows
        ASSERT_TRUE(shard_of_row(order, first) == rank || shard_of_row(order, first + 1) == rank);
      }
    }
  }
}

static_assert(tile_at({1, 2, 1, 2, 1}, 0) == Tile{1, 0});
static_assert(tile_at({1, 2, 1, 2, 1}, 1) == Tile{0, 0});

}  // namespace
}  // namespace tandem::schedule
