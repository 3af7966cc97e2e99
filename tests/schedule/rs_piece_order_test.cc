#include "schedule/rs_piece_order.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <tuple>
#include <vector>

namespace tandem::schedule {
namespace {

using Place = std::tuple<int, int, int, int>;  // owner, piece, row, column

Place place_of(const PieceTile& tile) {
  return {tile.owner, tile.piece, tile.row, tile.column};
}

std::vector<RsPieceOrder> orders() {
  std::vector<RsPieceOrder> all;
  for (const int ranks : {1, 2, 3, 4, 8}) {
    for (const auto& [rows, band, columns, pieces] : {std::tuple{1, 1, 1, 1},
                                                      {2, 2, 3, 1},
                                                      {4, 2, 8, 4},
                                                      {3, 3, 32, 2},
                                                      {8, 8, 48, 4},
                                                      {16, 8, 32, 1}}) {
      for (const int clusters : {1, 5, 66}) {
        for (const int steps : {9, 32, 192}) {
          RsPieceOrder order;
          order.rank = ranks / 2;
          order.ranks = ranks;
          order.row_tiles = rows;
          order.column_tiles = columns;
          order.pieces = pieces;
          order.band = band;
          order.clusters = std::min(clusters, order.tiles());
          order.steps = steps;
          order.added = 2 * (ranks - 1);
          order.least = 4;
          order.split = best_split(waves_of(order));
          all.push_back(order);
        }
      }
    }
  }
  return all;
}

testing::Message about(const RsPieceOrder& o) {
  return testing::Message() << o.ranks << " ranks, " << o.row_tiles << " x " << o.column_tiles
                            << " tiles in " << o.pieces << " pieces, " << o.clusters
                            << " clusters, " << o.steps << " steps, split " << o.split.served << " "
                            << o.split.helpers << " " << o.split.begin;
}

TEST(RsPieceOrder, VisitsEveryTileOncePieceAfterPieceAndTheOwnShardLast) {
  for (const RsPieceOrder& order : orders()) {
    SCOPED_TRACE(about(order));
    std::map<Place, int> seen;
    int before = 0;
    for (int at = 0; at < order.tiles(); ++at) {
      const PieceTile tile = tile_at(order, at);
      ASSERT_EQ(++seen[place_of(tile)], 1);
      ASSERT_TRUE(tile.row >= 0 && tile.row < order.row_tiles);
      ASSERT_TRUE(tile.column >= 0 && tile.column < order.piece_columns());
      ASSERT_EQ(tile.owner, rs_owner(order.rank, order.ranks, tile.step));
      ASSERT_EQ(tile.owner == order.rank, tile.step + 1 == order.ranks);
      const int number = tile.step * order.pieces + tile.piece;
      ASSERT_TRUE(number == before || number == before + 1);
      before = number;
    }
    ASSERT_EQ(before + 1, order.ranks * order.pieces);
  }
}

// Of each step every slice of a shard once, those of a tile together, in the order of the tiles.
TEST(RsPieceOrder, SlicesOfOthersTilesLeaveOnceInTheirOrder) {
  constexpr int kSlices = 4;
  for (const RsPieceOrder& order : orders()) {
    SCOPED_TRACE(about(order));
    const int of_shard = order.row_tiles * order.column_tiles * kSlices;
    std::map<std::pair<int, int>, int> seen;
    for (int at = 0; at < (order.ranks - 1) * of_shard; ++at) {
      const Slice slice = slice_at(order, kSlices, at);
      const PieceTile tile = tile_at(order, at / kSlices);
      ASSERT_EQ(slice.step, tile.step);
      ASSERT_LT(slice.step + 1, order.ranks);
      ASSERT_TRUE(slice.number >= 0 && slice.number < of_shard);
      ASSERT_EQ(slice.number / (order.row_tiles * kSlices), column_of(order, tile));
      ASSERT_EQ(slice.number % (order.row_tiles * kSlices) / kSlices, tile.row);
      ASSERT_EQ(++seen[std::pair(slice.step, slice.number)], 1);
    }
  }
}

TEST(RsPieceOrder, OnlyOwnTilesAreSplit) {
  int parts = 0;
  for (const RsPieceOrder& order : orders()) {
    SCOPED_TRACE(about(order));
    for (int cluster = 0; cluster < order.clusters; ++cluster) {
      for (int i = 0;; ++i) {
        const PieceWork work = work_at(order, cluster, i);
        if (work.end == 0) break;
        ASSERT_GE(work.end - work.begin, order.least);
        if (work.begin == 0 && work.end == order.steps) continue;
        ASSERT_EQ(work.tile.owner, order.rank);
        ++parts;
      }
    }
  }
  ASSERT_GT(parts, 5);
}

TEST(RsPieceOrder, ASplitEndsTheLastWaveSooner) {
  RsPieceOrder order;
  order.ranks = 4;
  order.row_tiles = 8;
  order.column_tiles = 48;
  order.clusters = 66;
  order.steps = 192;
  order.added = 6;
  order.least = 4;
  ASSERT_EQ(waves_of(order).rest, 18);
  order.split = best_split(waves_of(order));
  ASSERT_EQ(order.split.served, 1);
  ASSERT_EQ(order.split.helpers, 2);  // 18 tiles by 54 clusters
  ASSERT_LT(order.split.begin, 80);
  order.clusters = 64;
  ASSERT_EQ(waves_of(order).rest, 0);
  ASSERT_EQ(best_split(waves_of(order)).served, 0);
}

}  // namespace
}  // namespace tandem::schedule
