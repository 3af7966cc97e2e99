// What a block of encoded.h's kernel does beside the GEMM (gemm/cuda/product_block.cuh): local
// tiles wait for the slices that the peers sent and add them; remote ones' slices are copied into
// their owner's memory. A spare warp signals peers that this rank has entered, and advances the
// epoch.
#pragma once

#include "gemm/cuda/encoded_tile.cuh"
#include "gemm/cuda/product_block.cuh"
#include "overlap/gemm_rs/cuda/adding_order.cuh"
#include "overlap/gemm_rs/cuda/block_words.cuh"
#include "overlap/gemm_rs/cuda/encoded.h"
#include "schedule/rs_piece_order.h"

namespace tandem::gpu::fused {

template <class Encoded>
struct EncodedForm : PairedForm {
  using Tile = Encoded;
};

template <class Element, class Tile>
using EncodedProduct = ProductBlock<Element, Element, 2, sizeof(BlockWords<2>), EncodedForm<Tile>>;

template <class Element, class Tile>
struct EncodedRsBlock : EncodedProduct<Element, Tile> {
  using Base = EncodedProduct<Element, Tile>;
  using Base::kBoxes, Base::kCluster, Base::kGroupRows, Base::kGroups, Base::kTileColumns,
      Base::kTileRows;
  static constexpr int kStepsPerSource = Base::kStepsOfRows;
  static constexpr int kSliceBytes = Tile::kSliceBytes;
  static_assert(kGroupRows == AddingShape::kSliceRows && kBoxes == Tile::kBoxes);
  static_assert(Tile::kBoxBytes <= int(Base::kBoxBytes) && kSliceBytes <= int(Base::kWeightBytes) &&
                Tile::kSums == Base::kSums);

  struct Shared : Base::Shared {
    BlockWords<kGroups> words;
  };

  struct Params : OptionalLog {
    CUtensorMap x, weight, out;
    typename Base::Partials partials;
    schedule::RsPieceOrder order;      // in pairs of rows of tiles
    const schedule::PieceWork* works;  // of every cluster, one after the other; the last ends at 0
    int works_of_cluster;
    int shard_rows, slices_of_shard;
    int every;    // k-blocks from one box's store to the next one's
    float limit;  // of the result's dtype
    EncodedRsJob job;
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
      first_row = this->tile.owner * params.shard_rows + row;
      column = this->tile.column * kTileColumns;
      const int steps = this->end - this->begin;
      adding = {steps, own && !this->writes_partial ? params.order.added : 0,
                min(params.every, steps / kBoxes) * kBoxes, kStepsPerSource};
    }
    __device__ bool travels() const { return !own; }
    __device__ auto tile_coord() const {
      return cute::make_coord(first_row / kTileRows, this->tile.column);
    }
    // Not those of all blocks at one time, as the wire has to take them.
    __device__ int store_step(int group, int box) const {
      const int every = adding.lead / kBoxes;
      return schedule::store_step(every, int(blockIdx.x) / kCluster + group * (every / 2), box);
    }
    /// The one of its slices that a warpgroup has.
    __device__ int slice(const Params& params, int group) const {
      return (this->tile.column * params.shard_rows + row) / kGroupRows + group;
    }
  };

  /// In a rank's memory: what the source that is `step` of the ring sends it.
  template <class Bytes>
  __device__ static Bytes* slice_at(const Params& params, Bytes* memory, int step, int slice) {
    return memory + (int64_t(step) * params.slices_of_shard + slice) * kSliceBytes;
  }
  __device__ static uint64_t* landed(const Params& params, int rank, int step, int slice) {
    const EncodedRsJob& job = params.job;
    return job.staging.signals[rank] + job.landed + int64_t(step) * params.slices_of_shard + slice;
  }

  __device__ static void load(const Params& params, Shared& shared) {
    typename Base::Loader loader(shared);
    const EncodedRsJob& job = params.job;
    const int rank = job.staging.rank;
    uint64_t epoch = 0;      // of this call, when it is needed
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
      bool all_landed = false;
      own_tiles += work.adding.add_steps > 0;
#pragma unroll 1
      for (int add_step = 0; add_step < work.adding.add_steps; ++add_step) {
        load_until(schedule::steps_before(work.adding, add_step));
        if (add_step == 0) all_landed = have_landed(shared, own_tiles);  // as late as can be
        const int source = add_step / kStepsPerSource;
        const int slice = work.slice(params, add_step % kStepsPerSource);
        if (!all_landed) {
          if (epoch == 0) epoch = shared.words.epoch();
          wait_for_load(landed(params, rank, source, slice), epoch, patient(job.watch),
                        OpId::gemm_rs, schedule::rs_source(rank, job.staging.size, source), slice);
        }
        loader.load_slice(slice_at(params, job.staging.memory[rank], source, slice), kSliceBytes);
      }
      load_until(work.adding.steps);
      loader.load_partials(params.partials, work, patient(job.watch), OpId::gemm_rs, rank);
      loader.alternate_direction();
    });
  }

  __device__ static void store(const Params& params, Shared& shared, int group) {
    typename Base::Storer storer(shared, group);
    const uint64_t epoch = shared.words.epoch();
    unsigned own_tiles = 0;  // that add something received, so far
    Base::template for_each_work<Work>(params, [&](const Work& work, const Work& next) {
      own_tiles += work.adding.add_steps > 0;
      if (next.end != 0 && next.adding.add_steps > 0) {
        poll_received(params, shared, next, group, own_tiles + 1, epoch);
      }
      if (work.writes_partial) return storer.store_partial(params.partials, work);
      if (work.own) return storer.store(params.out, work.column, work.row);
      store_to_owner(params, storer, work, group, epoch);
    });
  }

  // When it has entered; to nowhere where that wait timed out.
  __device__ static void store_to_owner(const Params& params, typename Base::Storer& storer,
                                        const Work& work, int group, uint64_t epoch) {
    const EncodedRsJob& job = params.job;
    const int owner = work.tile.owner, step = work.tile.step;
    const int slice = work.slice(params, group);
    const bool entered = wait_for_load(job.staging.signals[job.staging.rank] + job.entered + owner,
                                       epoch, job.watch, OpId::gemm_rs, owner, -1);
    if (!entered) return storer.store_slice(nullptr, Tile::kBoxBytes);
    // The owner knows this rank by the step.
    storer.store_slice(slice_at(params, job.staging.memory[owner], step, slice), Tile::kBoxBytes);
    storer.complete();
    release_signal(landed(params, owner, step, slice), epoch);
  }

  // Has all landed that the next tile adds? The thread that loads would ask too late: an answer
  // takes longer than the pipeline's stages last. Where it is no, it waits itself; only time
  // depends on this.
  __device__ static void poll_received(const Params& params, Shared& shared, const Work& next,
                                       int group, unsigned number, uint64_t epoch) {
    for (int source = 0; source + 1 < params.order.ranks; ++source) {
      const int slice = next.slice(params, group);
      if (acquire_signal(landed(params, params.job.staging.rank, source, slice)) < epoch) return;
    }
    shared.words.note_landed(group, number);
  }
  // What this thread loads then comes behind them.
  __device__ static bool have_landed(const Shared& shared, unsigned number) {
    if (!shared.words.have_landed(number)) return false;
    asm volatile("fence.proxy.async;" ::: "memory");
    return true;
  }

  // By the spare warp.
  __device__ static void attend(const Params& params, Shared& shared) {
    begin_call(params.job, shared.words);
  }

  __device__ static void run(const Params& params, std::byte* memory) {
    Shared& shared = Base::template aligned<Shared>(memory);
    if (threadIdx.x == 0) shared.words.open();
    // The first thread of warp 2, which stores: it has nothing to do until a tile is finished.
    if (threadIdx.x == 64) {
      for (const CUtensorMap* map :
           {&params.x, &params.weight, &params.out, &params.partials.map}) {
        cute::prefetch_tma_descriptor(map);
      }
    }
    Base::template run<Work>(
        params, shared, [&] { load(params, shared); },
        [&](int group) { store(params, shared, group); }, [&] { attend(params, shared); });
  }

  static constexpr int kSharedBytes = int(sizeof(Shared)) + 1024;
  static_assert(kSharedBytes <= 227 * 1024);
};

}  // namespace tandem::gpu::fused
