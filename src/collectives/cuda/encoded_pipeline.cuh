// Overlap of the tiles of encoded_tiles.cuh. In step s the worker warps of a thread block encode
// tile s of the other ranks' shards and push it, sum tile s - kSumLag of the local shard as soon as
// it has arrived from all, and decode tile s - kSumLag - kTakeLag of all others. No warp waits for
// another of its block: each continues when its tile has arrived. The last warp signals to the
// peers what all workers have stored, so that no other warp waits for the completion of stores or
// for an emulated link.
//
// A signal is epoch << 16 | tiles: the number of tiles of a stream (shards, sums) that a thread
// block of one rank has stored for the thread block of the same index of another.
#pragma once

#include "collectives/cuda/encoded_tiles.cuh"
#include "collectives/cuda/exchange.cuh"
#include "comm/device/shared_word.cuh"

namespace tandem::gpu {

constexpr int kTileBits = 16;
static_assert(kMaxGpus <= 32, "a thread of a warp for every peer");

__device__ inline uint64_t tiles_signal(uint64_t epoch, int64_t tiles) {
  return epoch << kTileBits | uint64_t(tiles);
}
/// Signals follow those of the other kernels: [stream][source][block].
__device__ inline uint64_t* tile_flag(const ExchangeParams& params, int at, int stream,
                                      int source) {
  return params.table.signals[at] + kExchangeSignals +
         (stream * kMaxGpus + source) * kMaxPipelineBlocks + blockIdx.x;
}

/// Shared memory: number of tiles done per worker, and whether one has timed out.
struct WorkCounts {
  unsigned done[kTileStreams][kPipelineWorkers];
  unsigned lost;
};

/// Waits until tile `tile` has arrived from all peers; false on a timeout. Called by all threads of
/// a warp.
__device__ inline bool wait_for_tile(const EncodedParams& params, uint64_t epoch, TileStream stream,
                                     int64_t tile) {
  const ExchangeParams& exchange = params.exchange;
  const int peer = int(threadIdx.x) % 32;
  bool came = true;
  if (peer < exchange.table.size && peer != exchange.table.rank) {
    // Ranks that send sums wait for shards first, and report the missing rank.
    const Deadline deadline =
        stream == kShardTiles ? exchange.deadline : extend_deadline(exchange.deadline);
    came = wait_signal(tile_flag(exchange, exchange.table.rank, stream, peer),
                       tiles_signal(epoch, tile + 1), deadline, exchange.op, peer, blockIdx.x,
                       kTileBits);
  }
  const bool all = __all_sync(kAllLanes, came);
  __syncwarp();  // makes what one thread acquired visible to the others, unlike a vote
  return all;
}

/// Called by one warp: signals the peers as the workers progress. Ends with the last tile of both
/// streams, or if a worker has timed out: a late rank must not take leftovers of earlier calls for
/// this one's. Bounded by the workers.
__device__ inline void signal_tiles(const EncodedParams& params, const CallState& call,
                                    const Tiles& tiles, int64_t count, const WorkCounts& counts) {
  const ExchangeParams& exchange = params.exchange;
  const int lane = int(threadIdx.x) % 32, rank = exchange.table.rank;
  const bool signals = call.sends && lane < exchange.table.size && lane != rank;
  const int peer = signals ? lane : rank;
  int64_t stored[kTileStreams] = {}, signalled[kTileStreams] = {};
  uint64_t due[kTileStreams] = {};
  const auto bytes_since = [&](int stream, int64_t ready) {
    const WireParams& wire = params.wires[stream == kShardTiles ? peer : rank];
    int64_t bytes = 0;
    for (int64_t t = stored[stream]; t < ready; ++t) bytes += tiles.bytes(wire, t);
    return bytes;
  };
  for (bool left = true; left;) {
    bool idle = true;
    left = false;
#pragma unroll
    for (int stream = 0; stream < kTileStreams; ++stream) {
      const int64_t ready =
          __reduce_min_sync(kAllLanes, read_word(counts.done[stream][lane % kPipelineWorkers]));
      __syncwarp();
      if (signals && signalled[stream] == stored[stream] && ready > stored[stream]) {
        if (exchange.link_pacer)
          due[stream] = reserve(exchange.link_pacer, bytes_since(stream, ready));
        stored[stream] = ready;
      }
      if (signals && signalled[stream] < stored[stream] &&
          (!exchange.link_pacer || nanoseconds() >= due[stream])) {
        release_signal(tile_flag(exchange, peer, stream, rank),
                       tiles_signal(call.epoch, stored[stream]));
        signalled[stream] = stored[stream];
        idle = false;
      }
      left = left || (signals && signalled[stream] < count);
    }
    left = __any_sync(kAllLanes, left) && read_word(counts.lost) == 0;
    left = __all_sync(kAllLanes, left);
    if (idle) __nanosleep(32);
  }
}

/// Runs an entered call.
template <typename Block, typename Receiver>
__device__ void all_reduce_tiles(const EncodedParams& params, const CallState& call, int first,
                                 const Receiver& receiver, const Tiles& tiles, int64_t count,
                                 WorkCounts& counts) {
  const int second = first + params.exchange.table.size, worker = int(threadIdx.x) / 32;
  const auto done = [&](TileStream stream) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) add_to_word(counts.done[stream][worker], 1);
  };
  const auto lose = [&] {
    if (threadIdx.x % 32 != 0) return;
    give_up(params.exchange.calls, call.epoch);
    add_to_word(counts.lost, 1);
  };
  const int64_t sum_lag = params.sum_lag, take_lag = sum_lag + params.take_lag;
  for (int64_t step = 0; step < count + take_lag; ++step) {
    if (step < count) {
      push_tile<Block>(params, tiles, step, first, receiver);
      done(kShardTiles);
    }
    if (step == 0 && !call.sends) return lose();
    if (step >= sum_lag && step - sum_lag < count) {
      if (!wait_for_tile(params, call.epoch, kShardTiles, step - sum_lag)) return lose();
      sum_tile<Block>(params, tiles, step - sum_lag, first, second);
      done(kSumTiles);
    }
    if (step >= take_lag) {
      if (!wait_for_tile(params, call.epoch, kSumTiles, step - take_lag)) return lose();
      take_tile<Block>(params, tiles, step - take_lag, second);
    }
  }
}

}  // namespace tandem::gpu
