// Who carries which part of a shard to the peers, and when, where the blocks of a fused AG+GEMM do
// it themselves. A shard is cut into chunks of columns, so that tiles can follow it along K; a
// piece is a row of a chunk. Blocks take pieces in turn, all rows of a chunk before the next chunk.
// Pure functions of a block and its step, read by the GPU kernel and by the tests.
#pragma once

namespace tandem::schedule {

struct AgCourierOrder {
  int rows = 1, chunks = 1, blocks = 1;
};

struct CourierPiece {
  int row = 0, chunk = 0;
  friend constexpr bool operator==(const CourierPiece&, const CourierPiece&) = default;
};

/// Of one block; no two blocks differ by more than one.
constexpr int pieces_of(const AgCourierOrder& order, int block) {
  return (order.rows * order.chunks - block + order.blocks - 1) / order.blocks;
}

/// The first piece of `block`; its chunk may lie behind the last one where pieces_of() is 0.
constexpr CourierPiece first_piece(const AgCourierOrder& order, int block) {
  return {block % order.rows, block / order.rows};
}

/// The piece that the same block carries after `piece`.
constexpr CourierPiece next_piece(const AgCourierOrder& order, CourierPiece piece) {
  piece.row += order.blocks;
  for (; piece.row >= order.rows; piece.row -= order.rows) ++piece.chunk;
  return piece;
}

/// Whether the block carries nothing more of this piece's chunk.
constexpr bool ends_chunk(const AgCourierOrder& order, CourierPiece piece) {
  return piece.row + order.blocks >= order.rows;
}

}  // namespace tandem::schedule
