// GEMM+RS whose remote tiles are sent in a wire format (encoded.h): a GemmBlock
// (gemm/cuda/gemm_block.cuh) with fused_kernel.cuh's order and waits, and an encoded tile. Local
// tiles add the peers' slices; slices of remote tiles are copied into their owner's memory. The
// helper warp signals peers that this rank is ready, and advances the epoch.
#pragma once

#include <algorithm>
#include <optional>

#include "codec/message.h"
#include "codec/numbers.h"
#include "gemm/cuda/encoded_tile.cuh"
#include "gemm/cuda/gemm_launch.cuh"
#include "overlap/gemm_rs/cuda/chunk_order.cuh"
#include "overlap/gemm_rs/cuda/fused_base.cuh"
#include "overlap/scatter/cuda/encoded.h"

namespace tandem::gpu::fused {

template <class Element, class Codec>
struct EncodedRoles {
  // ---- Configuration ---------------------------------------------------------------------------

  using Tiles = FusedRsTiles<Element, Element>;
  using Shared = FusedRsShared<Tiles>;
  using Work = FusedRsWork<Tiles>;

  struct Params : OptionalLog {
    CUtensorMap x, weight, out;
    SplitPartials<Tiles> partials;
    schedule::RsChunkOrder order;  // in pairs of rows of tiles
    const schedule::ChunkWork* work_items;
    int items_of_cluster;
    int shard_rows, slices_of_shard;
    int every;    // k-blocks between the stores of two store tiles
    float limit;  // max finite value of the result's dtype
    EncodedRsArgs args;
  };

  __device__ static bool stores_remotely(const Params&) { return true; }

  __device__ static void open(const Params& params, Shared& shared) {
    if (threadIdx.x == 0) shared.words.open();
    // Thread 64 leads warp 2, which stores and is idle until a tile is finished.
    if (threadIdx.x != 64) return;
    for (const CUtensorMap* map : {&params.x, &params.weight, &params.out, &params.partials.map}) {
      cute::prefetch_tma_descriptor(map);
    }
  }

  /// Address, in a rank's memory, of a slice from the source at ring step `step`.
  template <class Bytes>
  __device__ static Bytes* slice_at(const Params& params, Bytes* memory, int step, int slice) {
    return memory + (int64_t(step) * params.slices_of_shard + slice) * Codec::kSliceBytes;
  }

  // ---- Loads ------------------------------------------------------------------------------------

  class Source : public FusedRsSource<EncodedRoles> {
   public:
    using FusedRsSource<EncodedRoles>::FusedRsSource;

    __device__ void load_added(StageFiller<Tiles>& stages, const Work& work, int i) {
      const Params& params = this->params_;
      const auto& staging = params.args.staging;
      const int source = i / Work::kStepsPerSource;
      const int slice = work.slice(params, i % Work::kStepsPerSource);
      this->await_added(
          i, [&] { this->await_signal(source, arrival_signal(params, source, slice), slice); });
      stages.load_slice(slice_at(params, staging.memory[staging.rank], source, slice),
                        Codec::kSliceBytes);
    }
  };

  // ---- Stores -----------------------------------------------------------------------------------

  class Sink : public FusedRsSink<EncodedRoles> {
   public:
    using Tile = EncodedTile<Tiles, Codec>;
    using FusedRsSink<EncodedRoles>::FusedRsSink;

    __device__ void store(TileStorer<Tiles>& storer, const Work& work) const {
      if (work.is_local) return storer.store(this->params_.out, work.column, work.row);
      store_to_owner(storer, work);
    }

   private:
    // Stores once the owner is ready; nothing is stored if that wait timed out.
    __device__ void store_to_owner(TileStorer<Tiles>& storer, const Work& work) const {
      const Params& params = this->params_;
      const int owner = work.tile.owner, slice = work.slice(params, this->group_);
      if (!is_ready(params.args, owner, this->epoch_)) {
        return storer.store_slice(nullptr, Codec::kBoxBytes);
      }
      // The owner identifies this rank by the ring step.
      storer.store_slice(slice_at(params, params.args.staging.memory[owner], work.tile.step, slice),
                         Codec::kBoxBytes);
      storer.complete();
      land(params, work, this->group_, this->epoch_);
    }
  };

  // ---- Helper warp ------------------------------------------------------------------------------

  __device__ static void spare(const Params& params, Shared& shared) {
    begin_call(params.args, shared.words);
  }

  __device__ static void close() {}
};

// ---- Launch ------------------------------------------------------------------------------------

template <class Element, class Codec>
class EncodedRs final : public EncodedRsKernel {
  using Block = GemmBlock<EncodedRoles<Element, Codec>>;
  using Tiles = typename Block::Tiles;
  using Params = typename Block::Params;
  using Partials = PartialsMemory<Tiles>;
  static_assert(Tiles::kTileColumns == FusedRsShape::tile_columns(dtype_of<Element>()));
  static_assert(FusedRsKernel::kMinK >= Tiles::kLead * Tiles::kStepOfK);
  static constexpr const char* kName = "encoded gemm_rs";

 public:
  explicit EncodedRs(const FusedRsShape& shape) : shape_(shape) {
    const int clusters = resident_clusters<Block>(kName);
    int slots = 0;
    for (const bool between : {false, true}) {
      Layout& layout = layouts_[between];
      layout.order =
          chunk_order<Tiles>(shape_, {.between = between}, clusters, Partials::kPossible);
      slots = std::max(slots, partial_slots(waves_of(layout.order), layout.order.split));
      layout.work_items = WorkItems(schedule::RsChunks(layout.order));
    }
    partials_.emplace(slots);
  }

  size_t slice_bytes() const override { return Codec::kSliceBytes; }
  bool has_between() const override {
    return layouts_[1].order.local_last() != layouts_[1].order.shard_tiles();
  }
  void launch(const EncodedRsArgs& args, cudaStream_t stream) override {
    if (!same(args)) prepare(args);
    launch_gemm<Block>(params_, params_.order.clusters, kName, stream);
  }

 private:
  using WorkItems = WorkTable<schedule::ChunkWork>;
  struct Layout {
    schedule::RsChunkOrder order;
    WorkItems work_items;
  };

  bool same(const EncodedRsArgs& args) const {
    return prepared_ && args.x == params_.args.x && args.weight == params_.args.weight &&
           args.out == params_.args.out && args.between == params_.args.between &&
           args.deadline.deadline_ns == params_.args.deadline.deadline_ns;
  }

  void prepare(const EncodedRsArgs& args) {
    const Layout& layout = layouts_[args.between];
    Params& params = params_;
    params.x = map_of<Element>(args.x, shape_.m, shape_.k, Tiles::kTileRows);
    params.weight =
        map_of<Element>(args.weight, shape_.n, shape_.k, Tiles::kTileColumns / Tiles::kCluster);
    params.out = map_of<Element>(args.out, shape_.shard_rows(), shape_.n, Tiles::kGroupRows);
    params.partials = partials_->memory();
    params.order = layout.order;
    params.work_items = layout.work_items.data();
    params.items_of_cluster = layout.work_items.of_cluster;
    params.shard_rows = int(shape_.shard_rows());
    params.slices_of_shard = int(shape_.slices());
    params.every = steps_between_boxes<Tiles>(layout.order);
    params.limit = codec::largest_of(shape_.result);
    params.args = args;
    prepared_ = true;
  }

  FusedRsShape shape_;
  Layout layouts_[2];  // local tiles last, or interleaved with remote ones
  std::optional<Partials> partials_;
  Params params_{};
  bool prepared_ = false;
};

}  // namespace tandem::gpu::fused
