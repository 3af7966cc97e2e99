// What a block of adding.h's kernel does beside the product (overlap/cuda/product_block.cuh): own
// tiles wait for parts and add them; others' are stored into their owner's memory, or into the
// outbox, where they are counted for the copy engine.
#pragma once

#include "overlap/cuda/product_block.cuh"
#include "overlap/gemm_rs/cuda/adding.h"
#include "schedule/rs_piece_order.h"

namespace tandem::gpu::fused {

template <class Element>
struct AddingBlock : ProductBlock<Element, 2> {
  using Base = ProductBlock<Element, 2>;
  using Base::kBoxes, Base::kCluster, Base::kGroupRows, Base::kGroups, Base::kTileColumns,
      Base::kTileRows;
  using typename Base::Shared;
  static constexpr int kStepsOfPart = Base::kStepsOfRows;
  static_assert(kMaxGpus * AddingKernel::kMostPieces <= 32);
  static_assert(kGroupRows == AddingKernel::kSliceRows);
  static constexpr int kSlices = kCluster * kGroups;  // of a cluster's tile

  struct Params {
    CUtensorMap x, weight, out, outbox, parts;
    CUtensorMap peers[kMaxGpus];  // their parts, where tiles are stored there
    typename Base::Lent lent;
    schedule::RsPieceOrder order;      // in pairs of rows of tiles
    const schedule::PieceWork* works;  // of every cluster, one after the other; the last ends at 0
    int works_of_cluster;
    int shard_rows, slices_of_shard;
    unsigned tiles_of_piece;  // by warpgroups
    int every;                // steps from a quarter of a tile that leaves to the next
    AddingJob job;
  };

  struct Work : schedule::PieceWork {
    bool own;
    int row;     // its first one, of the shard
    int column;  // its first one
    schedule::AddingOrder adding;
    __device__ Work(const Params& params, const schedule::PieceWork& work)
        : schedule::PieceWork(work) {
      own = this->tile.step + 1 == params.order.ranks;
      row = (this->tile.row * kCluster + int(cute::block_rank_in_cluster())) * kTileRows;
      column = this->tile.column * kTileColumns;
      const int steps = this->end - this->begin;
      adding = {steps, own && !this->lends ? params.order.added : 0,
                min(params.every, steps / kBoxes) * kBoxes, kStepsOfPart};
    }
    // Not those of all blocks at one time, as the wire has to take them.
    __device__ int leaves_at(int group, int box) const {
      const int every = adding.lead / kBoxes;
      return schedule::leaves_at(every, int(blockIdx.x) / kCluster + group * (every / 2), box);
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

  __device__ static bool stores_parts(const Params& params) { return params.order.pieces == 0; }

  /// The epoch of this call.
  __device__ static uint64_t epoch_of(const AddingJob& job) {
    return *static_cast<const volatile uint64_t*>(job.epoch) + 1;
  }

  __device__ static void load(const Params& params, Shared& shared) {
    typename Base::Loader loader(shared);
    const AddingJob& job = params.job;
    const uint64_t epoch = epoch_of(job);
    unsigned here = 0;  // pieces seen to have arrived, by bit of their signal
    Base::template for_each_work<Work>(params, [&](const Work& work) {
      const int first_row = work.tile.owner * params.shard_rows + work.row;
      int step = 0;
      const auto load_until = [&](int until) {
#pragma unroll 1
        for (; step < until; ++step) {
          loader.load_step(params.x, params.weight, loader.step_of(work, step), first_row,
                           work.column);
        }
      };
      // The signal may be seen to be there again.
      const auto await = [&](int source, int signal, int tile) {
        wait_for_load(job.staging.signals[job.staging.rank] + signal, epoch, patient(job.watch),
                      OpId::gemm_rs,
                      schedule::rs_source(job.staging.rank, job.staging.size, source), tile);
      };
#pragma unroll 1
      for (int part = 0; part < work.adding.parts; ++part) {
        load_until(schedule::steps_before(work.adding, part));
        const int source = part / kStepsOfPart, group = part % kStepsOfPart;
        if (stores_parts(params)) {
          const int slice = work.slice(params, group);
          await(source, job.landed + source * params.slices_of_shard + slice, slice);
        } else if (const int piece = source * AddingKernel::kMostPieces + work.tile.piece;
                   !(here >> piece & 1)) {
          await(source, job.arrived + piece, work.tile.piece);
          here |= 1u << piece;
        }
        loader.load_rows(params.parts, 0, work.row_of(params, source) + group * kGroupRows);
      }
      load_until(work.adding.steps);
      loader.borrow(params.lent, work, patient(job.watch), OpId::gemm_rs, job.staging.rank);
      loader.turn();
    });
  }

  __device__ static void store(const Params& params, Shared& shared, int group) {
    typename Base::Storer storer(shared, group);
    const uint64_t epoch = epoch_of(params.job);
    Base::template for_each_work<Work>(params, [&](const Work& work) {
      if (work.lends) {
        storer.lend(params.lent, work);
      } else if (work.own) {
        storer.store(params.out, work.column, work.row);
      } else if (stores_parts(params)) {
        store_part(params, storer, work, group, epoch);
      } else {
        storer.store(params.outbox, 0, work.row_of(params, work.tile.owner));
        storer.complete();
        __threadfence();
        count(params, work.tile);
      }
    });
  }

  // Into the owner's memory, when it has entered; nothing where it was waited for in vain.
  __device__ static void store_part(const Params& params, typename Base::Storer& storer,
                                    const Work& work, int group, uint64_t epoch) {
    const AddingJob& job = params.job;
    const int owner = work.tile.owner, step = work.tile.step;
    if (!has_entered(job, owner, epoch)) {
      return storer.store(params.outbox, 0, work.row_of(params, owner));
    }
    // The owner knows this rank by the step.
    storer.store(params.peers[owner], 0, work.row_of(params, step));
    storer.complete();
    release_signal(job.staging.signals[owner] + job.landed + step * params.slices_of_shard +
                       work.slice(params, group),
                   epoch);
  }

  __device__ static bool has_entered(const AddingJob& job, int owner, uint64_t epoch) {
    return wait_for_load(job.staging.signals[job.staging.rank] + job.entered + owner, epoch,
                         job.watch, OpId::gemm_rs, owner, -1);
  }

  // Who counts a piece's last tile tells the stream that sends it, when its owner has entered.
  __device__ static void count(const Params& params, const schedule::PieceTile& place) {
    const AddingJob& job = params.job;
    const int number = place.step * AddingKernel::kMostPieces + place.piece;
    if (atomicAdd(job.counted + number, 1) + 1 != params.tiles_of_piece) return;
    const uint64_t epoch = epoch_of(job);
    job.counted[number] = 0;
    const bool entered = has_entered(job, place.owner, epoch);
    // The stream copies in any case; an owner that comes late is not told.
    *static_cast<volatile uint64_t*>(job.sending + number) = entered ? epoch : 0;
    __threadfence_system();
    *static_cast<volatile unsigned*>(job.ready + number) = 1;
  }

  // Peers may overwrite what they sent for the last call.
  __device__ static void enter(const AddingJob& job, int peer) {
    if (peer >= job.staging.size || peer == job.staging.rank) return;
    release_signal(job.staging.signals[peer] + job.entered + job.staging.rank, epoch_of(job));
  }

  // The block that ends last leaves all as the next call wants it.
  __device__ static void leave(const AddingJob& job) {
    __threadfence();
    count_reader(job.done, gridDim.x, job.epoch);
  }

  __device__ static void run(const Params& params, std::byte* memory) {
    Shared& shared = Base::template aligned<Shared>(memory);
    if (threadIdx.x == 64) {
      const auto prefetch = [](const CUtensorMap& map) {
        asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
      };
      for (const CUtensorMap* map :
           {&params.x, &params.weight, &params.out, &params.parts, &params.lent.map}) {
        prefetch(*map);
      }
      if (stores_parts(params)) {
        for (int r = 0; r < params.order.ranks; ++r) prefetch(params.peers[r]);
      } else {
        prefetch(params.outbox);
      }
    }
    Base::template run<Work>(
        params, shared, [&] { load(params, shared); },
        [&](int group) { store(params, shared, group); },
        [&] {
          if (blockIdx.x == 0) enter(params.job, int(threadIdx.x) % 32);
        });
    if (threadIdx.x == 0) leave(params.job);
  }

  static constexpr int kSharedBytes = int(sizeof(Shared)) + 1024;
};

}  // namespace tandem::gpu::fused
