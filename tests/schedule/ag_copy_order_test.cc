#include "schedule/ag_copy_order.h"

#include <gtest/gtest.h>

#include <set>
#include <utility>
#include <vector>

namespace tandem::schedule {
namespace {

// Visits every block and checks its assignment.
void expect_whole(const AgCopyOrder& order) {
  SCOPED_TRACE(testing::Message() << order.rows << " rows, " << order.chunks << " chunks, "
                                  << order.blocks << " blocks, " << order.groups << " groups");
  std::set<std::pair<int, int>> seen;
  std::vector<int> signalled(size_t(order.chunks), 0);
  std::vector<std::set<int>> shares(size_t(order.groups));
  for (int block = 0; block < order.blocks; ++block) {
    const int group = block % order.groups;
    const CopyAssignment assignment = assignment_of(order, block);
    shares[size_t(group)].insert(assignment.num_items);
    CopyItem item = assignment.first;
    int carried = 0, before = -1;
    for (int step = 0; step < assignment.num_items; ++step) {
      ASSERT_TRUE(item.row >= 0 && item.row < order.rows && item.chunk < order.chunks);
      ASSERT_TRUE(seen.insert({item.row, item.chunk}).second);
      ASSERT_EQ(item.chunk % order.groups, group);
      ASSERT_GT(items_before(assignment, item), before);
      before = items_before(assignment, item);
      ++carried;
      const CopyItem next = next_item(assignment, item);
      const bool last = step + 1 == assignment.num_items || next.chunk != item.chunk;
      ASSERT_EQ(ends_chunk(assignment, item), last);
      if (last) signalled[size_t(item.chunk)] += std::exchange(carried, 0);
      item = next;
    }
  }
  ASSERT_EQ(int(seen.size()), order.rows * order.chunks);
  ASSERT_EQ(signalled, std::vector<int>(size_t(order.chunks), order.rows));
  for (const std::set<int>& share : shares) ASSERT_LE(*share.rbegin() - *share.begin(), 1);
}

TEST(AgCopyOrder, EveryItemIsCopiedOnceAndChunksAreSignalledWhenComplete) {
  for (const int blocks : {1, 2, 5, 8, 131, 132}) {
    for (const int rows : {1, 3, 8, 128, 140}) {
      for (const int chunks : {1, 2, 5, 8}) {
        for (const int groups : {1, 2, 3, 4}) {
          if (groups <= blocks) expect_whole({rows, chunks, blocks, groups});
        }
      }
    }
  }
}

TEST(AgCopyOrder, OneGroupCopiesItemsRoundRobin) {
  const AgCopyOrder order{140, 5, 132};
  for (int block = 0; block < order.blocks; ++block) {
    const CopyAssignment assignment = assignment_of(order, block);
    CopyItem item = assignment.first;
    for (int step = 0; step < assignment.num_items; ++step) {
      ASSERT_EQ(items_before(assignment, item), step * order.blocks + block);
      item = next_item(assignment, item);
    }
  }
}

constexpr CopyAssignment kOneGroup = assignment_of({4, 2, 3}, 1),
                         kSecondGroup = assignment_of({4, 4, 6, 2}, 3);
static_assert(next_item(kOneGroup, kOneGroup.first) == CopyItem{0, 1});
static_assert(next_item(kSecondGroup, kSecondGroup.first) == CopyItem{0, 3});

}  // namespace
}  // namespace tandem::schedule
