// Order in which the copy warps of a fused AG+GEMM's thread blocks send a shard to the peers. A
// shard is cut into chunks of columns, so that tiles can follow it along K; a copy item is one row
// of a chunk. Blocks form groups, which take the chunks round-robin: while one group waits for its
// sends to arrive, the next is sending. The blocks of a group take the rows of its chunks
// round-robin, all rows of a chunk before the next chunk. Pure functions of a block and its step,
// read by the GPU kernel and by the tests.
#pragma once

namespace tandem::schedule {

struct AgCopyOrder {
  int rows = 1, chunks = 1, blocks = 1;
  int groups = 1;  ///< at most `blocks`
};

struct CopyItem {
  int row = 0, chunk = 0;
  friend constexpr bool operator==(const CopyItem&, const CopyItem&) = default;
};

/// Copy items of one block; counts within a group differ by at most one.
struct CopyAssignment {
  CopyItem first;  ///< if there are no items, its chunk may be past the last one
  int num_items = 0;
  int rows = 1;     ///< per chunk
  int members = 1;  ///< blocks of the group
  int groups = 1;
};

constexpr CopyAssignment assignment_of(const AgCopyOrder& order, int block) {
  const int group = block % order.groups, member = block / order.groups;
  const int members = (order.blocks - group + order.groups - 1) / order.groups;
  const int chunks = (order.chunks - group + order.groups - 1) / order.groups;
  return {{member % order.rows, group + member / order.rows * order.groups},
          (order.rows * chunks - member + members - 1) / members,
          order.rows,
          members,
          order.groups};
}

/// Next copy item of the same block after `item`.
constexpr CopyItem next_item(const CopyAssignment& assignment, CopyItem item) {
  item.row += assignment.members;
  for (; item.row >= assignment.rows; item.row -= assignment.rows) item.chunk += assignment.groups;
  return item;
}

/// Whether the block has no further item of this chunk.
constexpr bool ends_chunk(const CopyAssignment& assignment, CopyItem item) {
  return item.row + assignment.members >= assignment.rows;
}

/// Number of copy items of all blocks sent before this one.
constexpr int items_before(const CopyAssignment& assignment, CopyItem item) {
  return item.chunk * assignment.rows + item.row;
}

}  // namespace tandem::schedule
