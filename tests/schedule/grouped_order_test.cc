#include "schedule/grouped_order.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <vector>

#include "tandem/random.h"

namespace tandem::schedule {
namespace {

TEST(GroupedOrder, VisitsEveryTileOfAGroupOnceBandByBand) {
  for (int row_tiles = 1; row_tiles <= 19; ++row_tiles) {
    for (int column_tiles = 1; column_tiles <= 7; ++column_tiles) {
      for (const int band : {1, 2, 3, 8, 64}) {
        std::set<std::pair<int, int>> seen;
        int last_band = 0;
        for (int at = 0; at < row_tiles * column_tiles; ++at) {
          const Tile tile = grouped_tile(at, row_tiles, column_tiles, band);
          ASSERT_GE(tile.row, 0);
          ASSERT_LT(tile.row, row_tiles);
          ASSERT_GE(tile.column, 0);
          ASSERT_LT(tile.column, column_tiles);
          ASSERT_GE(tile.row / band, last_band);
          last_band = tile.row / band;
          seen.insert({tile.row, tile.column});
        }
        ASSERT_EQ(int(seen.size()), row_tiles * column_tiles)
            << fmt::format("{} x {} by {}", row_tiles, column_tiles, band);
      }
    }
  }
}

TEST(GroupedOrder, ConcurrentTilesAreABandOfRowsByFewColumns) {
  // 132 blocks on 64 x 64 tiles: a wave reads 8 row tiles and at most 18 columns.
  for (int wave = 0; wave + 132 <= 64 * 64; wave += 132) {
    std::set<int> rows, columns;
    for (int at = wave; at < wave + 132; ++at) {
      const Tile tile = grouped_tile(at, 64, 64, 8);
      rows.insert(tile.row);
      columns.insert(tile.column);
    }
    EXPECT_LE(rows.size(), 16u);  // two bands if one ends in this wave
    EXPECT_LE(columns.size(), 19u);
  }
}

TEST(GroupedOrder, NoDistributionOfRowsNeedsMoreThanMaxTiles) {
  for (uint64_t draw = 0; draw < 2000; ++draw) {
    const auto random = philox(11, 1, draw);
    const int groups = 1 + int(random[0] % 40), tile_rows = 1 << (random[1] % 8);
    const int64_t rows = random[2] % 3000;
    std::vector<int64_t> counts(size_t(groups), 0);
    for (int64_t row = 0; row < rows; ++row) {
      // Some draws leave most groups empty, some give each group a row more than whole tiles.
      const uint64_t among = 1 + draw % uint64_t(groups);
      ++counts[size_t(philox(12, draw, uint64_t(row))[0] % among)];
    }
    int tiles = 0;
    for (const int64_t count : counts) tiles += group_tiles(count, tile_rows);
    ASSERT_LE(tiles, max_group_tiles(rows, groups, tile_rows));
  }
  EXPECT_EQ(max_group_tiles(130, 2, 128), 3);  // 1 and 129
  EXPECT_EQ(max_group_tiles(1, 8, 128), 1);
  EXPECT_EQ(max_group_tiles(0, 8, 128), 0);
}

TEST(GroupedOrder, StageHasTheTilesThatItsRowsComplete) {
  for (uint64_t draw = 0; draw < 3000; ++draw) {
    const auto random = philox(13, 1, draw);
    const int stages = 1 + int(random[0] % 8), tile_rows = 1 << (random[1] % 8);
    std::vector<int> stage_of;  // by row
    for (int stage = 0; stage < stages; ++stage) {
      const auto count = philox(14, draw, uint64_t(stage));
      stage_of.insert(stage_of.end(), count[0] % 3 == 0 ? 0 : count[1] % 300, stage);
    }
    const auto rows = int64_t(stage_of.size());
    int tile = 0;
    for (int stage = 0; stage < stages; ++stage) {
      const auto arrived = std::ranges::count_if(stage_of, [&](int of) { return of <= stage; });
      for (; tile < arrived_tiles(arrived, rows, tile_rows); ++tile) {
        const int64_t last = std::min<int64_t>(int64_t(tile + 1) * tile_rows, rows) - 1;
        ASSERT_EQ(stage_of[size_t(last)], stage) << "tile " << tile << " of " << rows << " rows";
      }
    }
    ASSERT_EQ(tile, group_tiles(rows, tile_rows));
  }
}

TEST(GroupedOrder, RoundRobinSlotsCoverAllPositionsWithoutGaps) {
  for (const BlockSlots& of : {BlockSlots{1, 1, 0},
                               {2, 2, 0},
                               {7, 7, 0},
                               {132, 132, 0},
                               {7, 5, 3},
                               {2, 1, 1},
                               {132, 116, 2},
                               {8, 8, 4}}) {
    for (int tiles = 0; tiles < 900; ++tiles) {
      std::vector<int> slots(size_t(of.blocks), 0);
      for (int position = 0; position < tiles; ++position) {
        const BlockSlot slot = slot_of(position, of);
        ASSERT_EQ(slot.slot, slots[size_t(slot.block)]++);
        if (slot.block >= of.early) {  // the early blocks have had theirs
          for (int early = 0; early < of.early; ++early) ASSERT_GE(slots[size_t(early)], of.rounds);
        }
      }
      for (int block = 0; block < of.blocks; ++block) {
        ASSERT_EQ(slots_of(block, tiles, of), slots[size_t(block)]);
      }
    }
  }
}

TEST(GroupedOrder, BlocksJoinAfterRowsAreSortedOrSent) {
  const Joining sorted{.of_row = 0.25f}, sent{.of_leaving = 0.5f, .min_of_leaving = 0.75f};
  EXPECT_FALSE(Joining{}.any());
  EXPECT_EQ(sorted.rounds(0, 100, 1000, 10), 0);
  EXPECT_EQ(sorted.rounds(1, 100, 1000, 10), 1);
  EXPECT_EQ(sorted.rounds(8, 100, 1000, 10), 2);
  EXPECT_EQ(sorted.rounds(9, 100, 1000, 10), 3);
  EXPECT_EQ(sorted.rounds(1 << 20, 0, 1001, 10), 101);  // all tiles belong to the early blocks
  EXPECT_EQ(sent.rounds(1 << 20, 0, 1000, 10), 0);      // nothing is sent
  EXPECT_EQ(sent.rounds(0, 4, 1000, 10), 3);
}

}  // namespace
}  // namespace tandem::schedule
