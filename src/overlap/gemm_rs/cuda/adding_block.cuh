// What a block of adding.h's kernel does beside the GEMM (gemm/cuda/product_block.cuh): local
// tiles wait for what the peers sent and add it; remote ones are stored into their owner's memory,
// now or later, or into the outbox (this rank's local send buffer), where they are counted for the
// copy engine. A spare warp signals peers that this rank has entered, advances the epoch, and sends
// what is sent later.
#pragma once

#include <type_traits>

#include "gemm/cuda/any_rows.cuh"
#include "gemm/cuda/product_block.cuh"
#include "overlap/gemm_rs/cuda/adding.h"
#include "overlap/gemm_rs/cuda/adding_delivery.cuh"
#include "overlap/gemm_rs/cuda/adding_order.cuh"
#include "overlap/gemm_rs/cuda/block_words.cuh"
#include "schedule/rs_piece_order.h"

namespace tandem::gpu::fused {

using AddingWords = BlockWords<2>;

template <class Operand, class Element>
using AddingProduct = ProductBlock<Operand, Element, 2, sizeof(AddingWords)>;

template <class Operand, class Element, class Rows = WholeTiles>
struct AddingBlock : AddingProduct<Operand, Element> {
  using Base = AddingProduct<Operand, Element>;
  using Base::kBoxes, Base::kCluster, Base::kGroupRows, Base::kGroups, Base::kTileColumns,
      Base::kTileRows;
  using Delivery = AddingDelivery<AddingBlock>;
  static constexpr int kStepsPerSource = Base::kStepsOfRows;
  static_assert(kMaxGpus * AddingKernel::kMostPieces <= 32);
  static_assert(kGroupRows == AddingShape::kSliceRows);
  static constexpr int kSlices = kCluster * kGroups;  // of a cluster's tile
  static constexpr int kNowhere = 1 << 30;            // a row

  struct Shared : Base::Shared {
    AddingWords words;
  };

  struct Params : OptionalLog {
    CUtensorMap x, weight, out, outbox, received;
    CUtensorMap peers[kMaxGpus];  // their `received`, where tiles are stored there
    typename Base::Partials partials;
    schedule::RsPieceOrder order;      // in pairs of rows of tiles
    const schedule::PieceWork* works;  // of every cluster, one after the other; the last ends at 0
    int works_of_cluster;
    int shard_rows, slices_of_shard;
    unsigned tiles_of_piece;  // by warpgroups
    int every;                // k-blocks from one box's store to the next one's
    int columns;
    bool scaled_by_row;
    AddingJob job;
    [[no_unique_address]] std::conditional_t<Rows::kAny, schedule::ShardRows, WholeTiles> shards;
  };

  struct Work : schedule::PieceWork {
    bool own;
    int row;        // its first one, of the shard
    int first_row;  // the same, of all shards
    int column;     // its first one
    schedule::AddingOrder adding;
    __device__ Work(const Params& params, const schedule::PieceWork& work)
        : schedule::PieceWork(work) {
      own = this->tile.step + 1 == params.order.ranks;
      row = (this->tile.row * kCluster + int(cute::block_rank_in_cluster())) * kTileRows;
      if constexpr (Rows::kAny) {
        first_row = params.shards.begin(this->tile.owner) + row;
      } else {
        first_row = this->tile.owner * params.shard_rows + row;
      }
      column = this->tile.column * kTileColumns;
      const int steps = this->end - this->begin;
      adding = {steps, own && !this->writes_partial ? params.order.added : 0,
                min(params.every, steps / kBoxes) * kBoxes,
                Base::Product::kFp8 ? max(1, params.order.added) : kStepsPerSource};
    }
    __device__ auto tile_coord() const {
      return cute::make_coord(first_row / kTileRows, this->tile.column);
    }
    __device__ auto scales(const Params& params) const {
      const auto tile = TileScales::at(params.job.scales, params.scaled_by_row, first_row, column,
                                       params.columns);
      if constexpr (Rows::kAny) {
        return ClippedScales{tile, params.shards.count(this->tile.owner) - row};
      } else {
        return tile;
      }
    }
    template <size_t kSums>
    __device__ void finish(const Params& params, float (&sums)[kSums],
                           int lane) const requires Rows::kAny {
      if (params.job.bias == nullptr || this->writes_partial) return;
      add_bias(sums, static_cast<const Element*>(params.job.bias) + column, params.columns - column,
               lane);
    }
    /// Whether its owner has no row of a warpgroup's.
    __device__ bool is_empty(const Params& params, int group) const {
      if constexpr (Rows::kAny) {
        return row + group * kGroupRows >= params.shards.count(this->tile.owner);
      }
      return false;
    }
    // Not those of all blocks at one time, as the wire has to take them.
    __device__ int store_step(int group, int box) const {
      const int every = adding.lead / kBoxes;
      return schedule::store_step(every, int(blockIdx.x) / kCluster + group * (every / 2), box);
    }
    /// Where its first row is among shards of columns of tiles, one below the other.
    __device__ int row_of(const Params& params, int shard) const {
      return (shard * params.order.column_tiles + this->tile.column) * params.shard_rows + row;
    }
    /// The one of its slices that a warpgroup has.
    __device__ int slice(const Params& params, int group) const {
      return (this->tile.column * params.shard_rows + row) / kGroupRows + group;
    }
  };

  __device__ static bool stores_remotely(const Params& params) { return params.order.pieces == 0; }

  __device__ static void load(const Params& params, Shared& shared) {
    typename Base::Loader loader(shared);
    const AddingJob& job = params.job;
    const Stamps stamps(params);
    uint64_t epoch = 0;      // of this call, when it is needed
    unsigned here = 0;       // pieces seen to have arrived, by bit of their signal
    unsigned own_tiles = 0;  // that add something received, so far
    Base::template for_each_work<Work>(params, [&](const Work& work) {
      int step = 0;
      const auto load_until = [&](int until) {
#pragma unroll 1
        for (; step < until; ++step) {
          loader.load_step(params.x, params.weight, loader.step_of(work, step), work.first_row,
                           work.column);
        }
      };
      const auto await_signal = [&](int source, int signal, int tile) {
        if (epoch == 0) epoch = shared.words.epoch();
        wait_for_load(job.staging.signals[job.staging.rank] + signal, epoch, patient(job.watch),
                      OpId::gemm_rs,
                      schedule::rs_source(job.staging.rank, job.staging.size, source), tile);
      };
      const auto await_received = [&](int source, int group) {
        const int slice = work.slice(params, group);
        const int piece = source * AddingKernel::kMostPieces + work.tile.piece;
        if (stores_remotely(params)) {
          await_signal(source, job.landed + source * params.slices_of_shard + slice, slice);
        } else if (!(here >> piece & 1)) {
          await_signal(source, job.arrived + piece, work.tile.piece);
          here |= 1u << piece;
        }
      };
      Stamps::Longest held;
      bool landed = false;
      own_tiles += work.adding.add_steps > 0;
#pragma unroll 1
      for (int add_step = 0; add_step < work.adding.add_steps; ++add_step) {
        load_until(schedule::steps_before(work.adding, add_step));
        if (add_step == 0) landed = have_landed(shared, own_tiles);  // as late as can be
        const int source = add_step / kStepsPerSource, group = add_step % kStepsPerSource;
        if (!landed) held.time([&] { await_received(source, group); });
        loader.load_rows(params.received, 0, work.row_of(params, source) + group * kGroupRows);
      }
      load_until(work.adding.steps);
      stamps.span(work.tile_coord(), work.adding.add_steps > 0, &TileRecord::held_begin,
                  &TileRecord::held_end, held);
      loader.load_partials(params.partials, work, patient(job.watch), OpId::gemm_rs,
                           job.staging.rank);
      loader.alternate_direction();
    });
  }

  __device__ static void store(const Params& params, Shared& shared, int group) {
    typename Base::Storer storer(shared, group);
    const Stamps stamps(params);
    const uint64_t epoch = shared.words.epoch();
    unsigned own_tiles = 0;  // that add something received, so far
    Base::template for_each_work<Work>(params, [&](const Work& work, const Work& next) {
      own_tiles += work.adding.add_steps > 0;
      if (stores_remotely(params) && next.end != 0 && next.adding.add_steps > 0) {
        poll_received(params, shared, next, group, own_tiles + 1, epoch);
      }
      if (work.writes_partial) return storer.store_partial(params.partials, work);
      stamps.count(work.tile_coord(), group == 0, &TileRecord::stores);
      if (work.own) {
        store_here(stamps, storer, work, group, params.out, work.column, work.row);
      } else if (stores_remotely(params)) {
        work.tile.later ? write_outbox(params, stamps, storer, work, group)
                        : store_to_owner(params, stamps, storer, work, group, epoch);
        shared.words.count_stored(group);
      } else {
        write_outbox(params, stamps, storer, work, group);
        __threadfence();
        Delivery::count(params, work.tile, epoch);
      }
    });
  }

  // In this rank's memory.
  __device__ static void store_here(const Stamps& stamps, typename Base::Storer& storer,
                                    const Work& work, int group, const CUtensorMap& to, int column,
                                    int row) {
    storer.store(to, column, row,
                 [&] { stamps.stamp(work.tile_coord(), group == 0, &TileRecord::store_begin); });
    stamps.stamp(work.tile_coord(), group == 0, &TileRecord::store_end);
  }
  __device__ static void write_outbox(const Params& params, const Stamps& stamps,
                                      typename Base::Storer& storer, const Work& work, int group) {
    store_here(stamps, storer, work, group, params.outbox, 0, work.row_of(params, work.tile.owner));
    storer.complete();
  }

  // Has all landed that the next tile adds? The thread that loads would ask too late: an answer
  // takes longer than the pipeline's stages last. Where it is no, it waits itself; only time
  // depends on this.
  __device__ static void poll_received(const Params& params, Shared& shared, const Work& next,
                                       int group, unsigned number, uint64_t epoch) {
    const AddingJob& job = params.job;
    const uint64_t* signal =
        job.staging.signals[job.staging.rank] + job.landed + next.slice(params, group);
    for (int source = 0; source + 1 < params.order.ranks; ++source) {
      if (acquire_signal(signal) < epoch) return;
      signal += params.slices_of_shard;
    }
    shared.words.note_landed(group, number);
  }
  // What this thread loads then comes behind them.
  __device__ static bool have_landed(const Shared& shared, unsigned number) {
    if (!shared.words.have_landed(number)) return false;
    asm volatile("fence.proxy.async;" ::: "memory");
    return true;
  }

  // Into the owner's memory, when it has entered; into the outbox, for nobody, where that wait
  // timed out.
  __device__ static void store_to_owner(const Params& params, const Stamps& stamps,
                                        typename Base::Storer& storer, const Work& work, int group,
                                        uint64_t epoch) {
    const int owner = work.tile.owner, step = work.tile.step;
    if (!Delivery::has_entered(params.job, owner, epoch)) {
      return storer.store(params.outbox, 0, work.row_of(params, owner));
    }
    // The owner knows this rank by the step. What lies beyond its memory is not stored.
    const int to = work.is_empty(params, group) ? kNowhere : work.row_of(params, step);
    storer.store(params.peers[owner], 0, to,
                 [&] { stamps.stamp(work.tile_coord(), group == 0, &TileRecord::wait_begin); });
    storer.complete();
    stamps.stamp(work.tile_coord(), group == 0, &TileRecord::wait_end);
    Delivery::land(params, work, group, epoch);
  }

  // By the spare warp.
  __device__ static void attend(const Params& params, Shared& shared) {
    const uint64_t epoch = begin_call(params.job, shared.words);
    __syncwarp();
    if (params.order.later > 0) Delivery::send_later(params, shared, epoch);
  }

  __device__ static void run(const Params& params, std::byte* memory) {
    Shared& shared = Base::template aligned<Shared>(memory);
    if (threadIdx.x == 0) shared.words.open();
    // The first thread of warp 2, which stores: it has nothing to do until a tile is finished.
    if (threadIdx.x == 64) {
      for (const CUtensorMap* map :
           {&params.x, &params.weight, &params.out, &params.received, &params.partials.map}) {
        cute::prefetch_tma_descriptor(map);
      }
      if (stores_remotely(params)) {
        for (int r = 0; r < params.order.ranks; ++r)
          cute::prefetch_tma_descriptor(&params.peers[r]);
      }
      if (!stores_remotely(params) || params.order.later > 0)
        cute::prefetch_tma_descriptor(&params.outbox);
    }
    Base::template run<Work>(
        params, shared, [&] { load(params, shared); },
        [&](int group) { store(params, shared, group); }, [&] { attend(params, shared); });
  }

  static constexpr int kSharedBytes = int(sizeof(Shared)) + 1024;
  static_assert(kSharedBytes <= 227 * 1024);
};

}  // namespace tandem::gpu::fused
