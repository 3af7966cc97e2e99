// Fused GEMM+RS (fused.h): a GemmBlock (gemm/cuda/gemm_block.cuh) whose local tiles wait for and
// add the peers' partials. Its remote tiles are stored into their owner's memory, immediately or
// later, or into the local send buffer, where they are counted for the copy engine. The
// helper warp signals peers that this rank is ready, advances the epoch, and sends deferred tiles.
#pragma once

#include <algorithm>
#include <optional>
#include <type_traits>
#include <vector>

#include "gemm/cuda/gemm_launch.cuh"
#include "overlap/gemm_rs/cuda/chunk_order.cuh"
#include "overlap/gemm_rs/cuda/fused_base.cuh"
#include "overlap/gemm_rs/cuda/fused_delivery.cuh"

namespace tandem::gpu::fused {

template <class Operand, class Element, class Rows, bool kWeightKn>
struct FusedRsRoles {
  // ---- Configuration ---------------------------------------------------------------------------

  using Tiles = FusedRsTiles<Operand, Element, kWeightKn>;
  using Shared = FusedRsShared<Tiles>;
  using Work = FusedRsWork<Tiles, Rows>;
  using Delivery = FusedRsDelivery<FusedRsRoles>;
  static_assert(kMaxGpus * FusedRsKernel::kMaxChunks <= 32);

  struct Params : OptionalLog {
    CUtensorMap x, weight, out, send_buffer, received;
    CUtensorMap peers[kMaxGpus];  // their `received`, for direct stores
    SplitPartials<Tiles> partials;
    schedule::RsChunkOrder order;  // in pairs of rows of tiles
    const schedule::ChunkWork* work_items;
    int items_of_cluster;
    int shard_rows, slices_of_shard;
    unsigned tiles_of_chunk;  // counted once per warpgroup
    int every;                // k-blocks between the stores of two store tiles
    int columns;
    bool scaled_by_row;
    FusedRsArgs args;
    [[no_unique_address]] std::conditional_t<Rows::kAny, schedule::ShardRows, WholeTiles> shards;
  };

  // If false, the copy engine sends.
  __device__ static bool stores_remotely(const Params& params) { return params.order.chunks == 0; }

  __device__ static void open(const Params& params, Shared& shared) {
    if (threadIdx.x == 0) shared.words.open();
    // Thread 64 leads warp 2, which stores and is idle until a tile is finished.
    if (threadIdx.x != 64) return;
    for (const CUtensorMap* map :
         {&params.x, &params.weight, &params.out, &params.received, &params.partials.map}) {
      cute::prefetch_tma_descriptor(map);
    }
    if (stores_remotely(params)) {
      for (int r = 0; r < params.order.ranks; ++r) cute::prefetch_tma_descriptor(&params.peers[r]);
    }
    if (!stores_remotely(params) || params.order.later > 0)
      cute::prefetch_tma_descriptor(&params.send_buffer);
  }

  // ---- Loads ------------------------------------------------------------------------------------

  class Source : public FusedRsSource<FusedRsRoles> {
   public:
    using FusedRsSource<FusedRsRoles>::FusedRsSource;

    __device__ void load_added(StageFiller<Tiles>& stages, const Work& work, int i) {
      const int source = i / Work::kStepsPerSource, group = i % Work::kStepsPerSource;
      this->await_added(i, [&] { await_received(work, source, group); });
      stages.load_rows(this->params_.received, 0,
                       work.row_of(this->params_, source) + group * Tiles::kGroupRows);
    }
    __device__ static auto scales(const Params& params, const Work& work) {
      const auto tile = TileScales::at(params.args.scales, params.scaled_by_row, work.first_row,
                                       work.column, params.columns);
      if constexpr (Rows::kAny) {
        return ClippedScales{tile, params.shards.count(work.tile.owner) - work.row};
      } else {
        return tile;
      }
    }

   private:
    __device__ void await_received(const Work& work, int source, int group) {
      const Params& params = this->params_;
      const int slice = work.slice(params, group);
      const int chunk = source * FusedRsKernel::kMaxChunks + work.tile.chunk;
      if (stores_remotely(params)) {
        this->await_signal(source, arrival_signal(params, source, slice), slice);
      } else if (!(here_ >> chunk & 1)) {
        this->await_signal(source, params.args.arrived + chunk, work.tile.chunk);
        here_ |= 1u << chunk;
      }
    }

    unsigned here_ = 0;  // chunks seen to have arrived, a bit per signal
  };

  // ---- Stores -----------------------------------------------------------------------------------

  class Sink : public FusedRsSink<FusedRsRoles> {
   public:
    using Tile = RoundedTile<Tiles>;

    __device__ Sink(const Params& params, Shared& shared, int group)
        : FusedRsSink<FusedRsRoles>(params, shared, group), timestamps_(params) {}

    template <size_t kSums>
    __device__ static void finish(const Params& params, const Work& work, float (&sums)[kSums],
                                  int lane) {
      if constexpr (Rows::kAny) {
        if (params.args.bias == nullptr || work.writes_partial) return;
        add_bias(sums, static_cast<const Element*>(params.args.bias) + work.column,
                 params.columns - work.column, lane);
      }
    }
    __device__ void store(TileStorer<Tiles>& storer, const Work& work) {
      const Params& params = this->params_;
      timestamps_.count(work.tile_coord(), this->group_ == 0, &TileRecord::stores);
      if (work.is_local) {
        store_here(storer, work, params.out, work.column, work.row);
      } else if (stores_remotely(params)) {
        work.tile.later ? write_send_buffer(storer, work) : store_to_owner(storer, work);
        this->shared_.words.count_stored(this->group_);
      } else {
        write_send_buffer(storer, work);
        __threadfence();
        Delivery::count(params, work.tile, this->epoch_);
      }
    }

   private:
    static constexpr int kNowhere = 1 << 30;  // a row

    // Stores into this rank's memory.
    __device__ void store_here(TileStorer<Tiles>& storer, const Work& work, const CUtensorMap& to,
                               int column, int row) const {
      const bool records = this->group_ == 0;
      storer.store(to, column, row, [&] {
        timestamps_.stamp(work.tile_coord(), records, &TileRecord::store_begin);
      });
      timestamps_.stamp(work.tile_coord(), records, &TileRecord::store_end);
    }
    __device__ void write_send_buffer(TileStorer<Tiles>& storer, const Work& work) const {
      const Params& params = this->params_;
      store_here(storer, work, params.send_buffer, 0, work.row_of(params, work.tile.owner));
      storer.complete();
    }
    // Stores into the owner's memory once it is ready; into the send buffer, unsent, if that wait
    // timed out.
    __device__ void store_to_owner(TileStorer<Tiles>& storer, const Work& work) const {
      const Params& params = this->params_;
      const int owner = work.tile.owner, group = this->group_;
      if (!is_ready(params.args, owner, this->epoch_)) {
        return storer.store(params.send_buffer, 0, work.row_of(params, owner));
      }
      // The owner identifies this rank by the ring step. Rows beyond its memory are not stored.
      const int to = work.is_empty(params, group) ? kNowhere : work.row_of(params, work.tile.step);
      storer.store(params.peers[owner], 0, to, [&] {
        timestamps_.stamp(work.tile_coord(), group == 0, &TileRecord::wait_begin);
      });
      storer.complete();
      timestamps_.stamp(work.tile_coord(), group == 0, &TileRecord::wait_end);
      land(params, work, group, this->epoch_);
    }

    const Timestamps timestamps_;
  };

  // ---- Helper warp ------------------------------------------------------------------------------

  __device__ static void spare(const Params& params, Shared& shared) {
    const uint64_t epoch = begin_call(params.args, shared.words);
    __syncwarp();
    if (params.order.later > 0) Delivery::send_later(params, shared, epoch);
  }

  __device__ static void close() {}
};

// ---- Launch ------------------------------------------------------------------------------------

/// `kWeightKn`: the weight is stored [k, n].
template <class Operand, class Element, class Rows = WholeTiles, bool kWeightKn = false>
class FusedRs final : public FusedRsKernel {
  using Roles = FusedRsRoles<Operand, Element, Rows, kWeightKn>;
  using Block = GemmBlock<Roles>;
  using Tiles = typename Block::Tiles;
  using Params = typename Block::Params;
  using Partials = PartialsMemory<Tiles>;
  static_assert(Tiles::kTileColumns == FusedRsShape::tile_columns(dtype_of<Operand>()));
  static_assert(kMinK >= Tiles::kLead * Tiles::kStepOfK);
  static_assert(std::ranges::all_of(kTileDeliveries, [](const TileDelivery& delivery) {
    return delivery.chunks <= kMaxChunks &&
           (delivery.chunks > 0) + int(delivery.between) + (delivery.later > 0) <= 1;
  }));
  static constexpr const char* kName = "fused gemm_rs";

 public:
  explicit FusedRs(const FusedRsShape& shape)
      : shape_(shape), shards_(schedule::shard_rows(shape.m, shape.ranks)) {
    const int clusters = resident_clusters<Block>(kName);
    int slots = 0;
    for (const TileDelivery& delivery : kTileDeliveries) {
      const schedule::RsChunkOrder order = order_of(delivery, clusters);
      // Equal on all ranks, as their GPUs are identical.
      if (delivery.chunks > 0 && order.column_tiles % delivery.chunks != 0) continue;
      if (delivery.between && (order.clusters >= order.shard_tiles() || order.shorter > 0))
        continue;
      if (Rows::kAny && delivery.chunks > 0) continue;
      if (delivery.later > order.shard_tiles()) continue;
      slots = std::max(slots, partial_slots(waves_of(order), order.split));
      deliveries_.push_back(delivery);
      layouts_.push_back({order, WorkItems(schedule::RsChunks(order))});
    }
    partials_.emplace(slots);
  }

  const std::vector<TileDelivery>& deliveries() const override { return deliveries_; }

  RecordedTiles recorded_tiles() const override {
    if (!kDeviceTimeline) return {};
    return {int(shape_.ranks * shape_.shard_rows() / Tiles::kTileRows), int(shape_.column_tiles())};
  }

  void launch(const FusedRsArgs& args, cudaStream_t stream) override {
    if (!same(args)) prepare(args);
    launch_gemm<Block>(params_, params_.order.clusters, kName, stream);
  }

 private:
  using WorkItems = WorkTable<schedule::ChunkWork>;
  struct Layout {
    schedule::RsChunkOrder order;
    WorkItems work_items;
  };

  bool same(const FusedRsArgs& args) const {
    return prepared_ && args.x == params_.args.x && args.weight == params_.args.weight &&
           args.out == params_.args.out && args.scales == params_.args.scales &&
           args.bias == params_.args.bias && args.delivery == params_.args.delivery &&
           args.deadline.deadline_ns == params_.args.deadline.deadline_ns &&
           args.timeline.records == params_.args.timeline.records;
  }

  schedule::RsChunkOrder order_of(const TileDelivery& delivery, int max_clusters) const {
    const int shorter =
        schedule::shards_with_fewer_tiles(shards_, shape_.ranks, FusedRsShape::kRows);
    return chunk_order<Tiles>(shape_, delivery, max_clusters, Partials::kPossible, shorter,
                              Rows::kAny);
  }

  void prepare(const FusedRsArgs& args) {
    Params params = params_;
    if (!prepared_ || args.delivery != params.args.delivery) lay_out(args, params);
    params.x = map_of<Operand>(args.x, shape_.m, shape_.k, Tiles::kTileRows);
    params.weight = map_weight<Tiles>(args.weight, shape_.n, shape_.k);
    params.out = map_of<Element>(args.out, shards_.count(shape_.rank), shape_.n, Tiles::kGroupRows);
    params.args = args;
    if constexpr (kDeviceTimeline) params.timeline = args.timeline;
    params_ = params;
    prepared_ = true;
  }

  // Sets everything that does not depend on the operands.
  void lay_out(const FusedRsArgs& args, Params& params) const {
    const Layout& layout = layouts_[size_t(args.delivery)];
    const int64_t shard = shape_.shard_rows();
    const auto map = [&](const void* shards, int64_t rows) {
      return map_of<Element>(shards, rows * shape_.column_tiles(), Tiles::kTileColumns,
                             Tiles::kGroupRows);
    };
    params.send_buffer = map(args.send_buffer, shape_.ranks * shard);
    params.received = map(args.received, (shape_.ranks - 1) * shard);
    for (int rank = 0; rank < shape_.ranks; ++rank) {
      params.peers[rank] = map(args.staging.memory[rank], (shape_.ranks - 1) * shard);
    }
    params.partials = partials_->memory();
    params.shard_rows = int(shard);
    params.tiles_of_chunk =
        unsigned(layout.order.chunk_tiles()) * (Tiles::kCluster * Tiles::kGroups);
    params.order = layout.order;
    params.work_items = layout.work_items.data();
    params.items_of_cluster = layout.work_items.of_cluster;
    params.slices_of_shard = int(shape_.slices());
    params.columns = int(shape_.n);
    params.scaled_by_row = shape_.scaled_by_row;
    params.every = steps_between_boxes<Tiles>(layout.order);
    if constexpr (Rows::kAny) params.shards = shards_;
  }

  FusedRsShape shape_;
  schedule::ShardRows shards_;
  std::vector<TileDelivery> deliveries_;
  std::vector<Layout> layouts_;  // by delivery
  std::optional<Partials> partials_;
  Params params_{};
  bool prepared_ = false;
};

}  // namespace tandem::gpu::fused
