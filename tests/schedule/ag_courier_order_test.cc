#include "schedule/ag_courier_order.h"

#include <gtest/gtest.h>

#include <set>
#include <utility>
#include <vector>

namespace tandem::schedule {
namespace {

TEST(AgCourierOrder, EveryPieceOnceChunkByChunkAndEveryChunkIsSignalledWhole) {
  for (const int blocks : {1, 2, 5, 8, 132}) {
    for (const int rows : {1, 3, 8, 128, 140}) {
      for (const int chunks : {1, 2, 5}) {
        const AgCourierOrder order{rows, chunks, blocks};
        std::set<std::pair<int, int>> seen;
        std::vector<int> signalled(size_t(chunks), 0);
        const int fewest = rows * chunks / blocks;
        for (int block = 0; block < blocks; ++block) {
          const int pieces = pieces_of(order, block);
          CourierPiece piece = first_piece(order, block);
          ASSERT_TRUE(pieces == fewest || pieces == fewest + 1);
          int carried = 0;
          for (int step = 0; step < pieces; ++step) {
            ASSERT_TRUE(seen.insert({piece.row, piece.chunk}).second);
            // In the order in which all blocks take them in turn.
            ASSERT_EQ(piece.chunk * rows + piece.row, step * blocks + block);
            ++carried;
            const CourierPiece next = next_piece(order, piece);
            const bool last = step + 1 == pieces || next.chunk != piece.chunk;
            ASSERT_EQ(ends_chunk(order, piece), last);
            if (last) signalled[size_t(piece.chunk)] += std::exchange(carried, 0);
            piece = next;
          }
        }
        ASSERT_EQ(int(seen.size()), rows * chunks);
        ASSERT_EQ(signalled, std::vector<int>(size_t(chunks), rows));
      }
    }
  }
}

static_assert(next_piece({4, 2, 3}, first_piece({4, 2, 3}, 1)) == CourierPiece{0, 1});

}  // namespace
}  // namespace tandem::schedule
