// What a block of the hand-written fused AG+GEMM does beside the GEMM
// (gemm/cuda/product_block.cuh): the loading thread waits for each chunk of a tile's rows before
// it loads it, between two loads, while the earlier ones are in flight, and reads the local shard
// in place. Where couriers carry the shards, they are the block's spare warp.
#pragma once

#include <limits>
#include <type_traits>

#include "gemm/cuda/any_rows.cuh"
#include "gemm/cuda/product_block.cuh"
#include "overlap/ag_gemm/cuda/fused.h"
#include "overlap/cuda/shard_courier.cuh"
#include "overlap/cuda/shard_gate.cuh"
#include "schedule/ag_wave_order.h"

namespace tandem::gpu::fused {

template <class Operand, class Element, class Courier>
using ArrivingProduct = ProductBlock<Operand, Element, 1, sizeof(typename Courier::Storage)>;

/// What a kernel for any rows has beside the rest.
struct ArrivingAnyRows {
  CUtensorMap outs[kMaxGpus];  // by shard, in place of `out`
  schedule::ShardRows shards;
  int longer;  // shards, the first ones, whose chunks count one more
  const void* bias;
};
struct ArrivingWholeTiles {};

template <class Operand, class Element, class Rows = WholeTiles, class Courier = ShardCourier>
struct ArrivingBlock : ArrivingProduct<Operand, Element, Courier> {
  using Base = ArrivingProduct<Operand, Element, Courier>;
  using Base::kTileColumns, Base::kTileRows;

  struct Params : OptionalLog, std::conditional_t<Rows::kAny, ArrivingAnyRows, ArrivingWholeTiles> {
    CUtensorMap own, gathered, weight, out;
    typename Base::Partials partials;
    const schedule::AgWork* works;  // of every cluster, one after the other; the last ends at 0
    int works_of_cluster;
    int rank, shard_tiles;
    int steps;        // k-blocks
    int chunk_steps;  // of a chunk
    RowScales scales;
    int columns;
    ShardGate gate;
    typename Courier::Route route;
  };

  struct Shared : Base::Shared {
    typename Courier::Storage courier;
  };

  struct Work : schedule::AgWork {
    schedule::AddingOrder adding;  // nothing but helpers' split-K partials
    __device__ Work(const Params& params, const schedule::AgWork& work) : schedule::AgWork(work) {
      const int block = int(cute::block_rank_in_cluster());
      this->row += block;
      if (params.shard_tiles == 1) this->shard += block;
      adding = {this->end - this->begin, 0, Base::kLead};
    }
    __device__ auto tile_coord() const { return cute::make_coord(this->row, this->column); }
    __device__ bool own(const Params& params) const { return this->shard == params.rank; }
    /// Of the matrix that its rows of x are in.
    __device__ int x_row(const Params& params) const {
      if constexpr (Rows::kAny) {
        return (own(params) ? 0 : params.shards.begin(this->shard)) + shard_row(params);
      }
      return (this->row - (own(params) ? params.rank * params.shard_tiles : 0)) * kTileRows;
    }
    /// Its first row, of its shard.
    __device__ int shard_row(const Params& params) const {
      return (this->row - this->shard * params.shard_tiles) * kTileRows;
    }
    __device__ auto scales(const Params& params) const {
      ScalePointers all = params.scales.own;
      if (params.scales.by_row && !own(params)) all.x = params.scales.gathered;
      const auto tile = TileScales::at(all, params.scales.by_row, x_row(params),
                                       this->column * kTileColumns, params.columns);
      if constexpr (Rows::kAny) {
        return ClippedScales{tile, params.shards.count(this->shard) - shard_row(params)};
      } else {
        return tile;
      }
    }
    template <size_t kSums>
    __device__ void finish(const Params& params, float (&sums)[kSums],
                           int lane) const requires Rows::kAny {
      if (params.bias == nullptr || this->writes_partial) return;
      const int first = this->column * kTileColumns;
      add_bias(sums, static_cast<const Element*>(params.bias) + first, params.columns - first,
               lane);
    }
    __device__ static int store_step(int, int box) { return box * Base::kEvery; }
  };

  __device__ static void load(const Params& params, Shared& shared) {
    typename Base::Loader loader(shared);
    const ShardGate& gate = params.gate;
    const uint64_t of_all = wanted(gate);
    // What a chunk's signal reaches, by the rows of its shard.
    const auto target_of = [&](const Work& work) -> uint64_t {
      if constexpr (Rows::kAny) {
        return of_all + (work.shard < params.longer ? of_all / gate.counts_per_chunk : 0);
      }
      return of_all;
    };
    const Stamps stamps(params);
    unsigned here = 0;  // shards that have wholly arrived, by bit
    Base::template for_each_work<Work>(params, [&](const Work& work) {
      const bool own = work.own(params);
      const uint64_t target = target_of(work);
      const CUtensorMap& x = own ? params.own : params.gathered;
      const int row = work.x_row(params);
      constexpr int kNever = std::numeric_limits<int>::max();
      int next = own || here >> work.shard & 1 ? kNever : 0;  // number of a k-block that waits
      const bool records = !own && !work.writes_partial;
      stamps.count(work.tile_coord(), records, &TileRecord::waits);
      stamps.stamp(work.tile_coord(), records, &TileRecord::wait_begin);
      stamps.stamp(work.tile_coord(), records && next == kNever, &TileRecord::wait_end);
      // The scales arrive before the first chunk, of which a piece of a split tile may read
      // nothing.
      if (params.scales.by_row && next != kNever && work.begin > 0) {
        wait_for_load(gate.arrived + work.shard * gate.chunks, target, gate.watch, OpId::ag_gemm,
                      work.shard, work.row);
      }
#pragma unroll 1
      for (int number = 0; number < work.end - work.begin; ++number) {
        // A shard that is still arriving is read in the order of its chunks, whatever the direction
        // of the tile before.
        const int step = next == kNever && schedule::may_go_backwards(params.shard_tiles)
                             ? loader.step_of(work, number)
                             : work.begin + number;
        if (number >= next) {
          const int chunk = step / params.chunk_steps;
          wait_for_load(gate.arrived + work.shard * gate.chunks + chunk, target, gate.watch,
                        OpId::ag_gemm, work.shard, work.row);
          if (next == 0) stamps.stamp(work.tile_coord(), records, &TileRecord::wait_end);
          next = (chunk + 1) * params.chunk_steps - work.begin;
        }
        loader.load_step(x, params.weight, step, row, work.column * kTileColumns);
      }
      if (work.begin == 0 && work.end == params.steps) here |= 1u << work.shard;
      loader.load_partials(params.partials, work, patient(gate.watch), OpId::ag_gemm, params.rank);
      loader.alternate_direction();
    });
    if (params.route.stops > 0)
      Courier(params.route).finish_epoch_read(Courier::kReadersPerBlock * gridDim.x);
  }

  __device__ static void store(const Params& params, Shared& shared, int group) {
    const Stamps stamps(params);
    typename Base::Storer storer(shared, group);
    Base::template for_each_work<Work>(params, [&](const Work& work) {
      if (work.writes_partial) {
        storer.store_partial(params.partials, work);
      } else {
        const auto begin = [&] {
          stamps.stamp(work.tile_coord(), group == 0, &TileRecord::store_begin);
        };
        if constexpr (Rows::kAny) {
          storer.store(params.outs[work.shard], work.column * kTileColumns, work.shard_row(params),
                       begin);
        } else {
          storer.store(params.out, work.column * kTileColumns, work.row * kTileRows, begin);
        }
        stamps.stamp(work.tile_coord(), group == 0, &TileRecord::store_end);
        stamps.count(work.tile_coord(), group == 0, &TileRecord::stores);
      }
    });
  }

  __device__ static void carry(const Params& params, Shared& shared) {
    if (params.route.stops == 0) return;
    const int lane = int(threadIdx.x) % 32;
    const Courier courier(params.route);
    if (blockIdx.x == 0 && lane == 0) courier.enter();
    __syncwarp();
    courier.carry(lane, shared.courier);
  }

  __device__ static void run(const Params& params, std::byte* memory) {
    Shared& shared = Base::template aligned<Shared>(memory);
    // The first thread of warp 2, which stores: it has nothing to do until a tile is finished.
    if (threadIdx.x == 64) {
      for (const CUtensorMap* map :
           {&params.own, &params.gathered, &params.weight, &params.out, &params.partials.map}) {
        if (!Rows::kAny || map != &params.out) cute::prefetch_tma_descriptor(map);
      }
    }
    Base::template run<Work>(
        params, shared, [&] { load(params, shared); },
        [&](int group) { store(params, shared, group); }, [&] { carry(params, shared); });
  }

  static constexpr int kSharedBytes = int(sizeof(Shared)) + 1024;
  static_assert(kSharedBytes <= 227 * 1024);
};

}  // namespace tandem::gpu::fused
