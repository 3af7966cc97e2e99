// The two halves of an all-reduce over a wire format by tiles, so that they overlap: what a warp
// does in each step of encoded_pipeline.cuh. A thread block's warps share a tile of every shard;
// tile t of thread block b is the (t blocks + b)-th of a shard.
#pragma once

#include "collectives/cuda/encoded_phases.cuh"

namespace tandem::gpu {

enum TileStream { kShardTiles, kSumTiles, kTileStreams };

/// The tiles of this thread block.
struct Tiles {
  int own, all, warps;  // this thread block, all of them, and the warps of each

  /// Blocks of a message that a tile has: one for every four threads.
  __device__ int64_t blocks() const { return int64_t(warps) * (32 / kQuad); }
  __device__ int64_t first_block(int64_t tile) const { return (tile * all + own) * blocks(); }
  /// Of a message; those of the longest are everybody's count.
  __device__ int64_t count(const WireJob& wire) const {
    const int64_t tiles = (wire.parts.blocks + blocks() - 1) / blocks();
    return (tiles + all - 1) / all;
  }
  /// What a message has of a tile.
  __device__ int64_t bytes(const WireJob& wire, int64_t tile) const {
    return wire.parts.bytes_of_blocks(first_block(tile), blocks());
  }
  /// Calls `with(block, lane, on)` for the block of a tile that this thread works on; all threads
  /// of a warp together, and none where it has no block.
  template <typename With>
  __device__ void work(const WireJob& wire, int64_t tile, const With& with) const {
    const int thread = int(threadIdx.x);
    const int64_t first = first_block(tile) + thread / 32 * (32 / kQuad);
    if (first >= wire.parts.blocks) return;
    const int64_t block = first + thread % 32 / kQuad;
    const bool on = block < wire.parts.blocks;
    with(on ? block : wire.parts.blocks - 1, thread % kQuad, on);
  }
};

/// Tile `tile` of every other rank's shard, encoded, to its owner.
template <typename Block, typename Receiver>
__device__ void push_tile(const EncodedJob& job, const Tiles& tiles, int64_t tile, int first,
                          const Receiver& receiver) {
  for (int step = 1; step < job.exchange.table.size; ++step) {
    const int owner = peer_after(job, step);
    tiles.work(job.wires[owner], tile, [&](int64_t block, int lane, bool on) {
      push_shard_block<Block>(job, owner, receiver(owner), first + job.exchange.table.rank, block,
                              lane, on);
    });
  }
}

/// Tile `tile` of the sum of this rank's shard, encoded, to all.
template <typename Block>
__device__ void sum_tile(const EncodedJob& job, const Tiles& tiles, int64_t tile, int first,
                         int second) {
  const MessageSum all = sum_of_shard(job, first);
  tiles.work(job.wires[job.exchange.table.rank], tile, [&](int64_t block, int lane, bool on) {
    push_sum_block<Block>(job, all, second, block, lane, on);
  });
}

/// Tile `tile` of every other rank's sum.
template <typename Block>
__device__ void take_tile(const EncodedJob& job, const Tiles& tiles, int64_t tile, int second) {
  for (int step = 1; step < job.exchange.table.size; ++step) {
    const int owner = peer_after(job, step);
    tiles.work(job.wires[owner], tile, [&](int64_t block, int lane, bool on) {
      take_block<Block>(job, owner, second + owner, block, lane, on);
    });
  }
}

}  // namespace tandem::gpu
