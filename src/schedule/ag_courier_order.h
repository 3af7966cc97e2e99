// Who carries which pieces of a shard to the peers, and when, where the blocks of a fused
// AG+GEMM do it themselves. A shard is cut into chunks of columns, so that tiles can follow it
// along K; a piece is a row of a chunk. Blocks are in groups, which take the chunks in turn: while
// those of one wait for what they have sent to arrive, those of the next are sending. The blocks of
// a group take the rows of its chunks in turn, all rows of a chunk before the next chunk. Pure
// functions of a block and its step, read by the GPU kernel and by the tests.
#pragma once

namespace tandem::schedule {

struct AgCourierOrder {
  int rows = 1, chunks = 1, blocks = 1;
  int groups = 1;  ///< at most as many as blocks
};

struct CourierPiece {
  int row = 0, chunk = 0;
  friend constexpr bool operator==(const CourierPiece&, const CourierPiece&) = default;
};

/// What one block carries; no two blocks of a group differ by more than one piece.
struct CourierAssignment {
  CourierPiece first;  ///< its chunk may lie behind the last one where there are no pieces
  int pieces = 0;
  int rows = 1;     ///< of a chunk
  int members = 1;  ///< blocks of the group
  int groups = 1;
};

constexpr CourierAssignment assignment_of(const AgCourierOrder& order, int block) {
  const int group = block % order.groups, member = block / order.groups;
  const int members = (order.blocks - group + order.groups - 1) / order.groups;
  const int chunks = (order.chunks - group + order.groups - 1) / order.groups;
  return {{member % order.rows, group + member / order.rows * order.groups},
          (order.rows * chunks - member + members - 1) / members,
          order.rows,
          members,
          order.groups};
}

/// The piece that the same block carries after `piece`.
constexpr CourierPiece next_piece(const CourierAssignment& assignment, CourierPiece piece) {
  piece.row += assignment.members;
  for (; piece.row >= assignment.rows; piece.row -= assignment.rows)
    piece.chunk += assignment.groups;
  return piece;
}

/// Whether the block carries nothing more of this piece's chunk.
constexpr bool ends_chunk(const CourierAssignment& assignment, CourierPiece piece) {
  return piece.row + assignment.members >= assignment.rows;
}

/// Pieces of all blocks that leave before this one.
constexpr int pieces_before(const CourierAssignment& assignment, CourierPiece piece) {
  return piece.chunk * assignment.rows + piece.row;
}

}  // namespace tandem::schedule
