// Tile order and work items of the kernel of arriving_kernel.cuh.
#pragma once

#include <algorithm>

#include "gemm/cuda/any_rows.cuh"
#include "gemm/cuda/gemm_block.cuh"
#include "overlap/ag_gemm/cuda/fused.h"
#include "schedule/ag_wave_order.h"
#include "schedule/shard_rows.h"

namespace tandem::gpu::fused {

/// A tile, or a split-K slice of it.
template <class Tiles, class Rows>
struct ArrivingWork : schedule::AgWork, NothingAdded {
  template <class Params>
  __device__ ArrivingWork(const Params& params, const schedule::AgWork& work)
      : schedule::AgWork(work) {
    const int block = int(cute::block_rank_in_cluster());
    this->row += block;
    if (params.shard_tiles == 1) this->shard += block;
  }
  __device__ auto tile_coord() const { return cute::make_coord(this->row, this->column); }
  template <class Params>
  __device__ bool is_local(const Params& params) const {
    return this->shard == params.rank;
  }
  /// First row in the matrix that holds its rows of x.
  template <class Params>
  __device__ int x_row(const Params& params) const {
    if constexpr (Rows::kAny) {
      return (is_local(params) ? 0 : params.shards.begin(this->shard)) + shard_row(params);
    }
    return (this->row - (is_local(params) ? params.rank * params.shard_tiles : 0)) *
           Tiles::kTileRows;
  }
  /// First row within its shard.
  template <class Params>
  __device__ int shard_row(const Params& params) const {
    return (this->row - this->shard * params.shard_tiles) * Tiles::kTileRows;
  }
  __device__ int first_column() const { return this->column * Tiles::kTileColumns; }
};

template <class Tiles, class Rows>
schedule::AgWaveOrder arriving_order(const FusedAgShape& shape, int max_clusters, bool splits) {
  constexpr int kPairRows = Tiles::kCluster * Tiles::kTileRows;
  constexpr int kSwept = schedule::kSweptRows / kPairRows;
  schedule::AgWaveOrder order;
  order.rows = {shape.rank, shape.ranks, int(shape.m / shape.ranks / Tiles::kTileRows),
                int((shape.n + Tiles::kTileColumns - 1) / Tiles::kTileColumns), 0};
  if constexpr (Rows::kAny) {
    const auto shards = schedule::shard_rows(shape.m, shape.ranks);
    const int tiles = (shards.maximum() + Tiles::kTileRows - 1) / Tiles::kTileRows;
    // The last tile of a pair may be empty.
    order.rows.shard_tiles = tiles == 1 && shape.ranks % 2 == 0 ? 1 : (tiles + 1) / 2 * 2;
    order.shorter = schedule::shards_with_fewer_tiles(shards, shape.ranks, kPairRows);
    order.band = schedule::even_band(in_pairs_of_rows(order.rows).shard_tiles, kSwept);
  } else {
    order.band = schedule::swept_rows(in_pairs_of_rows(order.rows).shard_tiles, kSwept);
  }
  order.steps = int((shape.k + Tiles::kStepOfK - 1) / Tiles::kStepOfK);
  order.minimum = Tiles::kLead;
  if (Tiles::Product::kFp8) order.rows_in_a_wave = 8;
  order.clusters = max_clusters;
  if (splits) order.split = best_split(waves_of(order));
  if (order.split.tiles == 0) order.clusters = std::min(order.clusters, waves_of(order).tiles);
  return order;
}

}  // namespace tandem::gpu::fused
