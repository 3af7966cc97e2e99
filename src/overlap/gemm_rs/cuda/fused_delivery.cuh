// Delivery of the tiles that fused_kernel.cuh writes to the send buffer first: sent later by a
// warp, or counted and sent by the copy engine.
#pragma once

#include "overlap/gemm_rs/cuda/fused_base.cuh"

namespace tandem::gpu::fused {

template <class Roles>
struct FusedRsDelivery {
  using Tiles = typename Roles::Tiles;
  using Params = typename Roles::Params;
  using Shared = typename Roles::Shared;
  using Work = typename Roles::Work;

  // ---- Deferred tiles, sent by a warp -----------------------------------------------------------

  // Starts when the block has stored all its remote tiles: the link then has slack.
  __device__ static void send_later(const Params& params, const Shared& shared, uint64_t epoch) {
    using Block = GemmBlock<Roles>;
    unsigned remote = 0;
    Block::for_each_work(params, [&](const Work& work) { remote += !work.is_local; });
    // Bounded by: the block's storing warps, which count each remote tile, also one whose owner's
    // wait timed out. They wait for the main loop and, up to its deadline, for that owner.
    while (!shared.words.are_stored(remote)) __nanosleep(400);  // a wave takes at least 21 us
    __syncwarp();
    const Timestamps timestamps(params);
    Block::for_each_work(params, [&](const Work& work) {
      if (!work.tile.later) return;
      const int lane = int(threadIdx.x) % 32;
      const bool ready_flags = lane == 0 && is_ready(params.args, work.tile.owner, epoch);
      if (!__any_sync(0xffffffff, ready_flags)) return;
      __syncwarp();
      timestamps.stamp(work.tile_coord(), lane == 0, &TileRecord::wait_begin);
#pragma unroll 1
      for (int group = 0; group < Tiles::kGroups; ++group) send_slice(params, work, group, epoch);
      timestamps.stamp(work.tile_coord(), lane == 0, &TileRecord::wait_end);
    });
  }

  __device__ static void send_slice(const Params& params, const Work& work, int group,
                                    uint64_t epoch) {
    constexpr int kLanes = 32, kVecs = Tiles::kBoxes * Tiles::kBoxBytes / 16,
                  kOfRow = kVecs / Tiles::kGroupRows;
    constexpr int kAtOnce = 8;  // loads in flight per lane: a read takes a microsecond
    static_assert(kVecs % (kLanes * kAtOnce) == 0);
    const FusedRsArgs& args = params.args;
    const int owner = work.tile.owner, lane = int(threadIdx.x) % kLanes;
    const auto vecs = [&](auto* memory, int shard) {
      return memory + size_t(work.row_of(params, shard) + group * Tiles::kGroupRows) * kOfRow +
             lane;
    };
    const uint4* from = vecs(static_cast<const uint4*>(args.send_buffer), owner);
    uint4* to = vecs(reinterpret_cast<uint4*>(args.staging.memory[owner]), work.tile.step);
    const int vecs_sent = work.is_empty(params, group) ? 0 : kVecs;
#pragma unroll 1
    for (int at = 0; at < vecs_sent; at += kLanes * kAtOnce) {
      uint4 words[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) words[i] = load_fresh(from + at + i * kLanes);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) to[at + i * kLanes] = words[i];
    }
    __syncwarp();
    if (lane == 0) land(params, work, group, epoch);
  }

  // ---- Tiles sent by the copy engine ------------------------------------------------------------

  // The thread that counts a chunk's last tile sets the flag that the sending stream waits for,
  // once the owner is ready.
  __device__ static void count(const Params& params, const schedule::ChunkTile& tile,
                               uint64_t epoch) {
    const FusedRsArgs& args = params.args;
    const int number = tile.step * FusedRsKernel::kMaxChunks + tile.chunk;
    if (atomicAdd(args.counted + number, 1) + 1 != params.tiles_of_chunk) return;
    args.counted[number] = 0;
    const bool ready_flags = is_ready(args, tile.owner, epoch);
    // The stream copies in any case; a late owner is not signalled.
    *static_cast<volatile uint64_t*>(args.sending + number) = ready_flags ? epoch : 0;
    __threadfence_system();
    *static_cast<volatile unsigned*>(args.ready + number) = 1;
  }
};

}  // namespace tandem::gpu::fused
