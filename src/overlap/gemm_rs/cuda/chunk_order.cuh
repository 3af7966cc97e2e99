// Tile order of the kernels of fused.h and encoded.h, and how their helper warp begins a call.
#pragma once

#include <algorithm>

#include "comm/device/device_signal.cuh"
#include "overlap/gemm_rs/cuda/fused.h"
#include "schedule/rs_chunk_order.h"
#include "schedule/shard_rows.h"
#include "schedule/wave_split.h"

namespace tandem::gpu::fused {

/// `shorter`: shards with one row of tiles less. `even_bands`: for shapes where a band's last rows
/// may be few.
template <class Tiles>
schedule::RsChunkOrder chunk_order(const FusedRsShape& shape, const TileDelivery& delivery,
                                   int max_clusters, bool splits, int shorter = 0,
                                   bool even_bands = false) {
  schedule::RsChunkOrder order;
  order.rank = shape.rank;
  order.ranks = shape.ranks;
  order.row_tiles = int(shape.shard_rows() / shape.kRows);
  order.column_tiles = int(shape.column_tiles());
  order.chunks = delivery.chunks;
  order.steps = int((shape.k + Tiles::kStepOfK - 1) / Tiles::kStepOfK);
  order.added = (order.ranks - 1) * Tiles::kStepsOfRows;
  order.minimum = Tiles::kLead;
  order.shorter = shorter;
  order.clusters = std::min(max_clusters, order.tiles());
  order.last = delivery.between ? order.clusters : order.shard_tiles();
  order.later = delivery.later;
  // Shards whose rows a raster group covers.
  const int shards = delivery.chunks > 0 ? 1 : delivery.between ? order.ranks : order.ranks - 1;
  const auto swept = [&](int maximum) {
    return even_bands ? schedule::even_band(order.row_tiles, maximum)
                      : schedule::swept_rows(order.row_tiles, maximum);
  };
  order.band = swept(std::max(1, schedule::kSweptRows / shape.kRows / shards));
  order.local_band = delivery.between ? order.band : swept(schedule::kSweptRows / shape.kRows);
  if (splits) order.split = best_split(waves_of(order));
  return order;
}

/// K-blocks between the stores of two store tiles. A tile's stores are spread over three quarters
/// of the next tile's k-blocks: at once they would be a burst, which is ruinous
/// (docs/results/gpu-experiments.md); over all of them, all received partials would be added after
/// the last one. At once if there are so few tiles that local ones are computed concurrently with
/// the ones they add, and helpers' local tiles wait for them.
template <class Tiles>
int steps_between_boxes(const schedule::RsChunkOrder& order) {
  const int others = order.tiles() - order.local_tiles();
  const bool at_once = order.split.tiles > 0 && others < order.clusters;
  if (order.chunks > 0 || at_once) return Tiles::kEvery;
  return std::max(Tiles::kEvery, order.steps * 3 / 4 / Tiles::kBoxes);
}

/// Called by all threads of a block's helper warp, first: publishes the call's epoch to the block
/// and signals the peers that this rank is ready. Returns the epoch.
template <class Args, class Words>
__device__ uint64_t begin_call(const Args& args, Words& words) {
  const int lane = int(threadIdx.x) % 32;
  uint64_t epoch = 0;
  if (lane == 0) {
    epoch = this_epoch(args.calls);
    words.publish_epoch(epoch);
  }
  epoch = __shfl_sync(0xffffffff, epoch, 0);
  if (blockIdx.x == 0 && lane < args.staging.size && lane != args.staging.rank) {
    // Peers may now overwrite what they sent for the last call.
    release_signal(args.staging.signals[lane] + args.ready_flags + args.staging.rank, epoch);
  }
  // No other thread of the block reads the counter. At the end of the kernel the atomic's reply
  // would be waited for.
  if (lane == 0) finish_epoch_read(args.calls, gridDim.x);
  return epoch;
}

}  // namespace tandem::gpu::fused
