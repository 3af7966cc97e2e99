// What a block of adding.h's kernel does beside the product (overlap/cuda/product_block.cuh): own
// tiles wait for parts and add them, others' leave for the outbox, where they are counted for the
// copy engine or marked for the blocks behind the product's, which send.
#pragma once

#include "overlap/cuda/product_block.cuh"
#include "overlap/gemm_rs/cuda/adding.h"
#include "overlap/gemm_rs/cuda/slice_sender.cuh"
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
    typename Base::Lent lent;
    schedule::RsPieceOrder order;      // in pairs of rows of tiles
    const schedule::PieceWork* works;  // of every cluster, one after the other; the last ends at 0
    int works_of_cluster;
    int shard_rows;
    unsigned tiles_of_piece;  // by warpgroups
    Outgoing outgoing;        // none where the copy engine sends
    AddingJob job;
  };

  struct Work : schedule::PieceWork {
    bool own;
    int row;                  // its first one, of the shard
    int column_tile, column;  // of all, and its first one
    schedule::AddingOrder adding;
    __device__ Work(const Params& params, const schedule::PieceWork& work)
        : schedule::PieceWork(work) {
      own = this->tile.step + 1 == params.order.ranks;
      row = (this->tile.row * kCluster + int(cute::block_rank_in_cluster())) * kTileRows;
      column_tile = schedule::column_of(params.order, this->tile);
      column = column_tile * kTileColumns;
      adding = {this->end - this->begin, own && !this->lends ? params.order.added : 0, Base::kLead,
                kStepsOfPart};
    }
    /// Where its first row is among shards of columns of tiles, one below the other.
    __device__ int row_of(const Params& params, int shard) const {
      return (shard * params.order.column_tiles + column_tile) * params.shard_rows + row;
    }
    /// The one of its slices that a warpgroup has.
    __device__ int slice(const Params& params, int group) const {
      return (column_tile * params.shard_rows + row) / kGroupRows + group;
    }
  };

  __device__ static void load(const Params& params, Shared& shared) {
    typename Base::Loader loader(shared);
    const AddingJob& job = params.job;
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
#pragma unroll 1
      for (int part = 0; part < work.adding.parts; ++part) {
        load_until(schedule::steps_before(work.adding, part));
        const int source = part / kStepsOfPart, group = part % kStepsOfPart;
        if (params.outgoing.senders > 0) {
          await_slice(params, source, work.slice(params, group));
        } else {
          await_piece(params, source, work.tile.piece, here);
        }
        loader.load_rows(params.parts, 0, work.row_of(params, source) + group * kGroupRows);
      }
      load_until(work.adding.steps);
      loader.borrow(params.lent, work, patient(job.watch), OpId::gemm_rs, job.staging.rank);
      loader.turn();
    });
  }

  __device__ static void await_piece(const Params& params, int source, int piece, unsigned& here) {
    const int signal = source * AddingKernel::kMostPieces + piece;
    if (here & 1u << signal) return;
    await_signal(params, source, params.job.arrived + signal, piece);
    here |= 1u << signal;
  }

  __device__ static void await_slice(const Params& params, int source, int slice) {
    await_signal(params, source,
                 params.job.landed + source * params.outgoing.slices_of_shard + slice, slice);
  }

  __device__ static void await_signal(const Params& params, int source, int signal, int tile) {
    const AddingJob& job = params.job;
    wait_for_load(job.staging.signals[job.staging.rank] + signal, epoch_of(job), patient(job.watch),
                  OpId::gemm_rs, schedule::rs_source(job.staging.rank, job.staging.size, source),
                  tile);
  }

  __device__ static void store(const Params& params, Shared& shared, int group) {
    typename Base::Storer storer(shared, group);
    Base::template for_each_work<Work>(params, [&](const Work& work) {
      if (work.lends) {
        storer.lend(params.lent, work);
      } else if (work.own) {
        storer.store(params.out, work.column, work.row);
      } else {
        storer.store(params.outbox, 0, work.row_of(params, work.tile.owner));
        storer.complete();
        if (params.outgoing.senders > 0) {
          mark(params, work.tile.step, work.slice(params, group));
        } else {
          count(params, work.tile);
        }
      }
    });
  }

  __device__ static void mark(const Params& params, int step, int slice) {
    volatile uint64_t* const computed = params.outgoing.computed;
    computed[step * params.outgoing.slices_of_shard + slice] = epoch_of(params.job);
  }

  // Who counts a piece's last tile tells the stream that sends it, when its owner has entered.
  __device__ static void count(const Params& params, const schedule::PieceTile& place) {
    const AddingJob& job = params.job;
    const int number = place.step * AddingKernel::kMostPieces + place.piece;
    if (atomicAdd(job.counted + number, 1) + 1 != params.tiles_of_piece) return;
    const uint64_t epoch = epoch_of(job);
    job.counted[number] = 0;
    const bool entered =
        wait_signal(job.staging.signals[job.staging.rank] + job.entered + place.owner, epoch,
                    job.watch, OpId::gemm_rs, place.owner);
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
    const int producers = params.order.clusters * kCluster;
    if (int(blockIdx.x) < producers) {
      multiply(params, memory);
    } else {
      using Sending = SliceSender::Shared;
      SliceSender::run(params.outgoing, params.job, Base::template aligned<Sending>(memory),
                       int(blockIdx.x) - producers);
    }
    if (threadIdx.x == 0) leave(params.job);
  }

  __device__ static void multiply(const Params& params, std::byte* memory) {
    Shared& shared = Base::template aligned<Shared>(memory);
    if (threadIdx.x == 64) {
      for (const CUtensorMap* map : {&params.x, &params.weight, &params.out, &params.outbox,
                                     &params.parts, &params.lent.map}) {
        asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
      }
    }
    Base::template run<Work>(
        params, shared, [&] { load(params, shared); },
        [&](int group) { store(params, shared, group); },
        [&] {
          if (blockIdx.x == 0) enter(params.job, int(threadIdx.x) % 32);
        });
  }

  static constexpr int kSharedBytes = int(sizeof(Shared)) + 1024;
  static_assert(sizeof(SliceSender::Shared) <= sizeof(Shared));
  static_assert(SliceSender::kPlaces <= Base::kThreads / 32);
};

}  // namespace tandem::gpu::fused
