// Order in which the blocks of chunk_attention.cu take tiles of queries: those that read the most
// keys first, of whichever chunk. Nothing but the chunks' first rows is read for it.
#pragma once

#include <algorithm>
#include <climits>

#include "kernels/cuda/sm90/chunk_kernels.h"

namespace tandem::gpu::sm90 {

/// Queries of a ticket, and the tiles of keys that they read.
struct Work {
  int row, tokens;         // of the queries; no tokens: there is no more work
  int sequence, position;  // of the first one
  int head;                // the first
  int end_key;             // of the sequence, with the chunk
  int begin, end;
};

/// Chunk with its first row's position. No rows if that is padding.
struct PlacedChunk {
  int first, rows, sequence, position;
};

__device__ inline int first_key(const ChunkParams& p, int position) {
  return p.window > 0 ? max(0, position + 1 - p.window) : 0;
}

/// Order of the tiles of queries, by the last tile of keys that they read, its `level`, the last
/// first. Run by a warp, which a chunk is given to each lane of.
template <int kKeys>
class Order {
 public:
  __device__ Order(const ChunkParams& p, PlacedChunk* chunks)
      : p_(p),
        chunks_(chunks),
        lane_(int(threadIdx.x) % 32),
        tokens_(kChunkTile / p.heads_of_tile) {
    for (int c = lane_; c < p.num_chunks; c += 32) {
      const Chunk chunk = p.chunks[c];
      const int sequence = p.sequences[chunk.first];
      chunks[c] = {chunk.first, sequence < 0 ? 0 : chunk.rows, sequence, p.positions[chunk.first]};
    }
    __syncwarp();
    for (int c = lane_; c < p.num_chunks; c += 32) tiles_ += tiles(c);
    tiles_ = int(__reduce_add_sync(~0u, unsigned(tiles_)));
  }
  __device__ int num_tickets() const { return tiles_ * heads(); }

  /// Tickets may not decrease from call to call.
  __device__ Work find(int ticket) {
    const int tile = ticket / heads();
    while (tile >= end_) begin_ = end_, descend();
    int rank = tile - begin_;  // within the level
    for (int first = 0;; first += 32) {
      const int c = first + lane_;
      const int later = c < p_.num_chunks ? tiles_from(c, level_ + 1) : 0;
      const int count = c < p_.num_chunks ? tiles_from(c, level_) - later : 0;
      int through = count;
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        const int other = __shfl_up_sync(~0u, through, offset);
        if (lane_ >= offset) through += other;
      }
      const unsigned has = __ballot_sync(~0u, rank < through);
      if (has == 0) {
        rank -= __shfl_sync(~0u, through, 31);
        continue;
      }
      const int lane = __ffs(int(has)) - 1, index = later + rank - (through - count);
      return work(first + lane, __shfl_sync(~0u, index, lane), ticket % heads());
    }
  }

 private:
  __device__ int heads() const {
    return p_.heads / p_.heads_of_tile;
  }
  __device__ int tiles(int c) const {
    return (chunks_[c].rows + tokens_ - 1) / tokens_;
  }
  /// Tiles of a chunk whose level is at least `level`.
  __device__ int tiles_from(int c, int level) const {
    const int before = level * kKeys - chunks_[c].position;  // tokens of lower levels
    if (before >= chunks_[c].rows) return 0;
    return tiles(c) - (before <= 0 ? 0 : before / tokens_);
  }
  /// Makes the next level that has tiles the current one.
  __device__ void descend() {
    int next = 0;
    for (int c = lane_; c < p_.num_chunks; c += 32) {
      const int left = end_ == 0 ? tiles(c) : tiles(c) - tiles_from(c, level_);
      if (left == 0) continue;
      const int tokens = min(left * tokens_, chunks_[c].rows);
      next = max(next, (chunks_[c].position + tokens - 1) / kKeys);
    }
    level_ = int(__reduce_max_sync(~0u, unsigned(next)));
    int through = 0;
    for (int c = lane_; c < p_.num_chunks; c += 32) through += tiles_from(c, level_);
    end_ = int(__reduce_add_sync(~0u, unsigned(through)));
  }
  /// Tile of a chunk that so many later ones follow.
  __device__ Work work(int c, int index, int head) const {
    const PlacedChunk& chunk = chunks_[c];
    const int first = (tiles(c) - 1 - index) * tokens_, tokens = min(tokens_, chunk.rows - first);
    const int position = chunk.position + first;
    return {chunk.first + first,
            tokens,
            chunk.sequence,
            position,
            head * p_.heads_of_tile,
            chunk.position + chunk.rows,
            first_key(p_, position) / kKeys,
            (position + tokens - 1) / kKeys + 1};
  }

  const ChunkParams& p_;
  PlacedChunk* const chunks_;
  const int lane_, tokens_;
  int tiles_ = 0;
  int level_ = INT_MAX, begin_ = 0, end_ = 0;  // the current level, and its tiles
};

}  // namespace tandem::gpu::sm90
