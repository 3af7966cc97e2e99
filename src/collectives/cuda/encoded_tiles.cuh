// Tile-wise halves of an all-reduce over a wire format, so that they overlap: the work of a warp in
// each step of encoded_pipeline.cuh. A thread block's warps share a tile of every shard; tile t of
// thread block b is tile t x blocks + b of a shard.
#pragma once

#include "collectives/cuda/encoded_phases.cuh"

namespace tandem::gpu {

enum TileStream { kShardTiles, kSumTiles, kTileStreams };

/// Tiles of this thread block.
struct Tiles {
  int local, all, warps;  // index of this thread block, number of blocks, warps per block

  /// Blocks of a message per tile: one for every four threads.
  __device__ int64_t blocks() const { return int64_t(warps) * (32 / kQuad); }
  __device__ int64_t first_block(int64_t tile) const { return (tile * all + local) * blocks(); }
  /// Tiles of a message; all ranks use the count of the longest message.
  __device__ int64_t count(const WireParams& wire) const {
    const int64_t tiles = (wire.layout.blocks + blocks() - 1) / blocks();
    return (tiles + all - 1) / all;
  }
  /// Bytes of a message in a tile.
  __device__ int64_t bytes(const WireParams& wire, int64_t tile) const {
    return wire.layout.bytes_of_blocks(first_block(tile), blocks());
  }
  /// Calls `with(block, lane, on)` for this thread's block of a tile, convergently in each warp, or
  /// not at all in a warp without blocks.
  template <typename With>
  __device__ void work(const WireParams& wire, int64_t tile, const With& with) const {
    const int thread = int(threadIdx.x);
    const int64_t first = first_block(tile) + thread / 32 * (32 / kQuad);
    if (first >= wire.layout.blocks) return;
    const int64_t block = first + thread % 32 / kQuad;
    const bool on = block < wire.layout.blocks;
    with(on ? block : wire.layout.blocks - 1, thread % kQuad, on);
  }
};

/// Encodes tile `tile` of every other rank's shard and sends it to its owner.
template <typename Block, typename Receiver>
__device__ void push_tile(const EncodedParams& params, const Tiles& tiles, int64_t tile, int first,
                          const Receiver& receiver) {
  for (int step = 1; step < params.exchange.table.size; ++step) {
    const int owner = peer_after(params, step);
    tiles.work(params.wires[owner], tile, [&](int64_t block, int lane, bool on) {
      push_shard_block<Block>(params, owner, receiver(owner), first + params.exchange.table.rank,
                              block, lane, on);
    });
  }
}

/// Encodes tile `tile` of the sum of this rank's shard and sends it to all.
template <typename Block>
__device__ void sum_tile(const EncodedParams& params, const Tiles& tiles, int64_t tile, int first,
                         int second) {
  const MessageSum all = sum_of_shard(params, first);
  tiles.work(params.wires[params.exchange.table.rank], tile, [&](int64_t block, int lane, bool on) {
    push_sum_block<Block>(params, all, second, block, lane, on);
  });
}

/// Decodes tile `tile` of every other rank's sum.
template <typename Block>
__device__ void take_tile(const EncodedParams& params, const Tiles& tiles, int64_t tile,
                          int second) {
  for (int step = 1; step < params.exchange.table.size; ++step) {
    const int owner = peer_after(params, step);
    tiles.work(params.wires[owner], tile, [&](int64_t block, int lane, bool on) {
      take_block<Block>(params, owner, second + owner, block, lane, on);
    });
  }
}

}  // namespace tandem::gpu
