// Common parts of the kernels of fused.h and encoded.h: work items, order of the pipeline stages,
// and waits for received partials.
#pragma once

#include "gemm/cuda/any_rows.cuh"
#include "gemm/cuda/gemm_block.cuh"
#include "overlap/contract/cuda/wait_ids.h"
#include "overlap/gemm_rs/cuda/block_words.cuh"
#include "overlap/gemm_rs/cuda/fused.h"
#include "schedule/rs_chunk_order.h"
#include "schedule/slice_order.h"

namespace tandem::gpu::fused {

template <class Operand, class Element, bool kWeightKn = false>
using FusedRsTiles = GemmTiles<Operand, Element,
                               TileOptions{.local_bytes = int(sizeof(BlockWords<2>)),
                                           .weight_transposed = kWeightKn}>;

template <class Tiles>
struct FusedRsShared : Tiles::Shared {
  BlockWords<Tiles::kGroups> words;
};

/// Index of the signal that a slice from the source at ring step `step` has arrived.
template <class Params>
__device__ int arrival_signal(const Params& params, int step, int slice) {
  return params.args.arrived_tiles + step * params.slices_of_shard + slice;
}
/// Waits until a tile's owner is ready for this call; false if that times out.
template <class Args>
__device__ bool is_ready(const Args& args, int owner, uint64_t epoch) {
  return wait_for_load(args.staging.signals[args.staging.rank] + args.ready_flags + owner, epoch,
                       args.deadline, kGemmRsWait, owner, -1);
}

/// A tile of the local or of a remote shard, or a split-K slice of a local tile.
template <class Tiles, class Rows = WholeTiles>
struct FusedRsWork : schedule::ChunkWork {
  static constexpr int kStepsPerSource = Tiles::kStepsOfRows;
  static_assert(Tiles::kGroupRows == FusedRsShape::kSliceRows);

  bool is_local;
  int row;        // first row within the shard
  int first_row;  // first row within all shards
  int column;     // first column
  schedule::SliceOrder slice_order;

  template <class Params>
  __device__ FusedRsWork(const Params& params, const schedule::ChunkWork& work)
      : schedule::ChunkWork(work) {
    is_local = this->tile.step + 1 == params.order.ranks;
    row =
        (this->tile.row * Tiles::kCluster + int(cute::block_rank_in_cluster())) * Tiles::kTileRows;
    if constexpr (Rows::kAny) {
      first_row = params.shards.begin(this->tile.owner) + row;
    } else {
      first_row = this->tile.owner * params.shard_rows + row;
    }
    column = this->tile.column * Tiles::kTileColumns;
    const int steps = this->end - this->begin;
    slice_order = {steps, is_local && !this->writes_partial ? params.order.added : 0,
                   min(params.every, steps / Tiles::kBoxes) * Tiles::kBoxes,
                   Tiles::Product::kFp8 ? max(1, params.order.added) : kStepsPerSource};
  }
  __device__ int added() const { return slice_order.add_steps; }
  __device__ int steps_before(int i) const { return schedule::steps_before(slice_order, i); }
  __device__ auto tile_coord() const {
    return cute::make_coord(first_row / Tiles::kTileRows, this->tile.column);
  }
  /// Whether it is stored for another rank.
  __device__ bool travels() const { return !is_local; }
  /// Whether its owner has no row in a warpgroup's slice.
  template <class Params>
  __device__ bool is_empty(const Params& params, int group) const {
    if constexpr (Rows::kAny) {
      return row + group * Tiles::kGroupRows >= params.shards.count(this->tile.owner);
    }
    return false;
  }
  /// Row of its first element among shards stored as columns of tiles, one below another.
  template <class Params>
  __device__ int row_of(const Params& params, int shard) const {
    return (shard * params.order.column_tiles + this->tile.column) * params.shard_rows + row;
  }
  /// Index of a warpgroup's slice.
  template <class Params>
  __device__ int slice(const Params& params, int group) const {
    return (this->tile.column * params.shard_rows + row) / Tiles::kGroupRows + group;
  }
};

/// Signals the owner that a slice, stored before this, has arrived.
template <class Params, class Work>
__device__ void land(const Params& params, const Work& work, int group, uint64_t epoch) {
  // The owner identifies this rank by the ring step.
  release_signal(params.args.staging.signals[work.tile.owner] +
                     arrival_signal(params, work.tile.step, work.slice(params, group)),
                 epoch);
}

/// Loads x and the weight. A kernel's own source loads the partials that a local tile adds.
template <class Roles>
class FusedRsSource {
  using Tiles = typename Roles::Tiles;
  using Params = typename Roles::Params;
  using Shared = typename Roles::Shared;
  using Work = typename Roles::Work;

 public:
  static constexpr int kCopyingLanes = 0;

  __device__ FusedRsSource(const Params& params, Shared& shared)
      : params_(params), shared_(shared), timestamps_(params) {}

  __device__ void begin(const Work& work) {
    stalled_ = {};
    arrived_ = false;
    local_tiles_ += work.added() > 0;
  }
  __device__ void load_step(StageFiller<Tiles>& stages, const Work& work, int number) {
    stages.load_step(params_.x, params_.weight, direction_.step_of(work, number), work.first_row,
                     work.column);
  }
  __device__ void end(const Work& work) {
    timestamps_.span(work.tile_coord(), work.added() > 0, &TileRecord::stalled_begin,
                     &TileRecord::stalled_end, stalled_);
    direction_.reverse();
  }
  __device__ Waiter waiter() const {
    return {extend_deadline(params_.args.deadline), kGemmRsWait, params_.args.staging.rank};
  }
  __device__ void close() const {}

 protected:
  /// Called before stage `i` of the added partials is loaded. Calls `await` unless a storing thread
  /// has seen all of them arrive.
  template <class Await>
  __device__ void await_added(int i, Await&& await) {
    if (i == 0) arrived_ = have_arrived(local_tiles_);  // as late as possible
    if (!arrived_) stalled_.time(await);
  }
  /// Waits for `signal`: slice or chunk `what` of `source`.
  __device__ void await_signal(int source, int signal, int what) {
    if (epoch_ == 0) epoch_ = shared_.words.epoch();
    const auto& staging = params_.args.staging;
    wait_for_load(staging.signals[staging.rank] + signal, epoch_,
                  extend_deadline(params_.args.deadline), kGemmRsWait,
                  schedule::rs_source(staging.rank, staging.size, source), what);
  }

  const Params& params_;

 private:
  // The fence orders this thread's later bulk loads after the arrival.
  __device__ bool have_arrived(unsigned number) const {
    if (!shared_.words.have_arrived(number)) return false;
    asm volatile("fence.proxy.async;" ::: "memory");
    return true;
  }

  Shared& shared_;
  const Timestamps timestamps_;
  uint64_t epoch_ = 0;        // this call, read when first needed
  unsigned local_tiles_ = 0;  // tiles so far that add received partials
  Serpentine direction_;
  // State of the current work item:
  Timestamps::Longest stalled_;
  bool arrived_;
};

/// Paces the store tiles and looks one tile ahead. A kernel's own sink does the stores.
template <class Roles>
class FusedRsSink : public DirectSink {
  using Tiles = typename Roles::Tiles;
  using Params = typename Roles::Params;
  using Shared = typename Roles::Shared;
  using Work = typename Roles::Work;

 public:
  static constexpr bool kLooksAhead = true;

  __device__ FusedRsSink(const Params& params, Shared& shared, int group)
      : params_(params), shared_(shared), group_(group), epoch_(shared.words.epoch()) {}

  // Staggers the blocks, since the link cannot take all their stores at once.
  __device__ static int write_step(const Work& work, int group, int box) {
    const int every = work.slice_order.lead / Tiles::kBoxes;
    return schedule::store_step(every, int(blockIdx.x) / Tiles::kCluster + group * (every / 2),
                                box);
  }
  __device__ void look_ahead(const Work& work, const Work& next) {
    local_tiles_ += work.added() > 0;
    if (Roles::stores_remotely(params_) && next.end != 0 && next.added() > 0) {
      poll_received(next, local_tiles_ + 1);
    }
  }

 protected:
  const Params& params_;
  Shared& shared_;
  int group_;
  uint64_t epoch_;

 private:
  // Polls whether all partials that the next tile adds have arrived. The loading thread would ask
  // too late: a reply takes longer than the pipeline's stages last. If not, that thread waits
  // itself; this affects only timing.
  __device__ void poll_received(const Work& next, unsigned number) {
    const auto& staging = params_.args.staging;
    const uint64_t* signal =
        staging.signals[staging.rank] + arrival_signal(params_, 0, next.slice(params_, group_));
    for (int source = 0; source + 1 < params_.order.ranks; ++source) {
      if (acquire_signal(signal) < epoch_) return;
      signal += params_.slices_of_shard;
    }
    shared_.words.note_arrived(group_, number);
  }

  unsigned local_tiles_ = 0;  // tiles so far that add received partials
};

}  // namespace tandem::gpu::fused
