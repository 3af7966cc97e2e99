// The hand-written fused AG+GEMM: a GemmBlock (gemm/cuda/gemm_block.cuh) whose rows of x arrive
// while it runs. The loading thread waits for each chunk of a tile's rows before it loads it,
// between two loads, while earlier ones are in flight, and reads the local shard in place. If copy
// warps transfer the shards, they are the blocks' helper warps.
#pragma once

#include <limits>
#include <map>
#include <optional>
#include <type_traits>

#include "gemm/cuda/any_rows.cuh"
#include "gemm/cuda/gemm_launch.cuh"
#include "overlap/ag_gemm/cuda/arriving_order.cuh"
#include "overlap/ag_gemm/cuda/fused.h"
#include "overlap/contract/cuda/wait_ids.h"
#include "overlap/gather/cuda/shard_arrivals.cuh"
#include "overlap/gather/cuda/shard_copy_warp.cuh"

namespace tandem::gpu::fused {

/// Additional parameters of an any-rows kernel.
struct ArrivingAnyRows {
  CUtensorMap outs[kMaxGpus];  // by shard, instead of `out`
  schedule::ShardRows shards;
  int longer;  // leading shards, whose chunks count one row more
  const void* bias;
};
struct ArrivingWholeTiles {};

template <class Operand, class Element, class Rows, class CopyWarp, bool kWeightKn>
struct ArrivingRoles {
  // ---- Configuration ---------------------------------------------------------------------------

  using Tiles = GemmTiles<Operand, Element,
                          TileOptions{.buffers = 1,
                                      .local_bytes = int(sizeof(typename CopyWarp::Storage)),
                                      .weight_transposed = kWeightKn}>;

  struct Params : OptionalLog, std::conditional_t<Rows::kAny, ArrivingAnyRows, ArrivingWholeTiles> {
    CUtensorMap local, gathered, weight, out;
    SplitPartials<Tiles> partials;
    const schedule::AgWork* work_items;
    int items_of_cluster;
    int rank, shard_tiles;
    int steps;        // in k-blocks
    int chunk_steps;  // k-blocks per chunk
    RowScales scales;
    int columns;
    ShardArrivals arrivals;
    typename CopyWarp::Route route;
  };

  struct Shared : Tiles::Shared {
    typename CopyWarp::Storage copy_warp;
  };

  using Work = ArrivingWork<Tiles, Rows>;

  __device__ static void open(const Params& params, Shared&) {
    // Thread 64 leads warp 2, which stores and is idle until a tile is finished.
    if (threadIdx.x != 64) return;
    for (const CUtensorMap* map :
         {&params.local, &params.gathered, &params.weight, &params.out, &params.partials.map}) {
      if (!Rows::kAny || map != &params.out) cute::prefetch_tma_descriptor(map);
    }
  }

  // ---- Loads ------------------------------------------------------------------------------------

  class Source {
   public:
    static constexpr int kCopyingLanes = 0;

    __device__ Source(const Params& params, Shared&)
        : params_(params), timestamps_(params), of_all_(wanted(params.arrivals)) {}

    __device__ void begin(const Work& work) {
      const bool is_local = work.is_local(params_);
      target_ = target_of(work);
      x_ = is_local ? &params_.local : &params_.gathered;
      row_ = work.x_row(params_);
      next_ = is_local || here_ >> work.shard & 1 ? kNever : 0;
      records_ = !is_local && !work.writes_partial;
      timestamps_.count(work.tile_coord(), records_, &TileRecord::waits);
      timestamps_.stamp(work.tile_coord(), records_, &TileRecord::wait_begin);
      timestamps_.stamp(work.tile_coord(), records_ && next_ == kNever, &TileRecord::wait_end);
      // The scales arrive before the first chunk, of which a split-K slice may read nothing.
      if (params_.scales.by_row && next_ != kNever && work.begin > 0) await_chunk(work, 0);
    }
    __device__ void load_step(StageFiller<Tiles>& stages, const Work& work, int number) {
      // A shard that is still arriving is read in chunk order, whatever direction the last tile
      // had.
      const int step = next_ == kNever && schedule::may_go_backwards(params_.shard_tiles)
                           ? direction_.step_of(work, number)
                           : work.begin + number;
      if (number >= next_) {
        const int chunk = step / params_.chunk_steps;
        await_chunk(work, chunk);
        if (next_ == 0) timestamps_.stamp(work.tile_coord(), records_, &TileRecord::wait_end);
        next_ = (chunk + 1) * params_.chunk_steps - work.begin;
      }
      stages.load_step(*x_, params_.weight, step, row_, work.first_column());
    }
    __device__ void end(const Work& work) {
      if (work.begin == 0 && work.end == params_.steps) here_ |= 1u << work.shard;
      direction_.reverse();
    }
    __device__ Waiter waiter() const {
      return {extend_deadline(params_.arrivals.deadline), kAgGemmWait, params_.rank};
    }
    __device__ void close() const {
      if (params_.route.targets > 0)
        CopyWarp(params_.route).finish_epoch_read(CopyWarp::kReadersPerBlock * gridDim.x);
    }

    __device__ static auto scales(const Params& params, const Work& work) {
      ScalePointers all = params.scales.local;
      if (params.scales.by_row && !work.is_local(params)) all.x = params.scales.gathered;
      const auto tile = TileScales::at(all, params.scales.by_row, work.x_row(params),
                                       work.first_column(), params.columns);
      if constexpr (Rows::kAny) {
        return ClippedScales{tile, params.shards.count(work.shard) - work.shard_row(params)};
      } else {
        return tile;
      }
    }

   private:
    static constexpr int kNever = std::numeric_limits<int>::max();

    // Signal value of an arrived chunk, by the rows of its shard.
    __device__ uint64_t target_of(const Work& work) const {
      if constexpr (Rows::kAny) {
        return of_all_ +
               (work.shard < params_.longer ? of_all_ / params_.arrivals.counts_per_chunk : 0);
      }
      return of_all_;
    }
    __device__ void await_chunk(const Work& work, int chunk) const {
      const ShardArrivals& arrivals = params_.arrivals;
      wait_for_load(arrivals.arrived + work.shard * arrivals.chunks + chunk, target_,
                    arrivals.deadline, kAgGemmWait, work.shard, work.row);
    }

    const Params& params_;
    const Timestamps timestamps_;
    uint64_t of_all_;
    unsigned here_ = 0;  // shards that have completely arrived, a bit each
    Serpentine direction_;
    // State of the current work item:
    uint64_t target_;
    const CUtensorMap* x_;
    int row_;
    int next_;  // index of the next k-block to wait for
    bool records_;
  };

  // ---- Stores -----------------------------------------------------------------------------------

  class Sink : public DirectSink {
   public:
    using Tile = RoundedTile<Tiles>;

    __device__ Sink(const Params& params, Shared&, int group)
        : params_(params), timestamps_(params), group_(group) {}

    __device__ static int write_step(const Work&, int, int box) { return box * Tiles::kEvery; }
    template <size_t kSums>
    __device__ static void finish(const Params& params, const Work& work, float (&sums)[kSums],
                                  int lane) {
      if constexpr (Rows::kAny) {
        if (params.bias == nullptr || work.writes_partial) return;
        const int first = work.first_column();
        add_bias(sums, static_cast<const Element*>(params.bias) + first, params.columns - first,
                 lane);
      }
    }
    __device__ void store(TileStorer<Tiles>& storer, const Work& work) {
      const auto begin = [&] {
        timestamps_.stamp(work.tile_coord(), group_ == 0, &TileRecord::store_begin);
      };
      if constexpr (Rows::kAny) {
        storer.store(params_.outs[work.shard], work.first_column(), work.shard_row(params_), begin);
      } else {
        storer.store(params_.out, work.first_column(), work.row * Tiles::kTileRows, begin);
      }
      timestamps_.stamp(work.tile_coord(), group_ == 0, &TileRecord::store_end);
      timestamps_.count(work.tile_coord(), group_ == 0, &TileRecord::stores);
    }

   private:
    const Params& params_;
    const Timestamps timestamps_;
    int group_;
  };

  // ---- Copy warp (idle if the copy engine transfers the shards) ---------------------------------

  __device__ static void spare(const Params& params, Shared& shared) {
    if (params.route.targets == 0) return;
    const int lane = int(threadIdx.x) % 32;
    const CopyWarp copy_warp(params.route);
    if (blockIdx.x == 0 && lane == 0) copy_warp.enter();
    __syncwarp();
    copy_warp.carry(lane, shared.copy_warp);
  }

  __device__ static void close() {}
};

// ---- Launch ------------------------------------------------------------------------------------

/// `kWeightKn`: the weight is stored [k, n].
template <class Operand, class Element, class Rows = WholeTiles, class CopyWarp = ShardCopyWarp,
          bool kWeightKn = false>
class Arriving final : public FusedAgKernel {
  using Block = GemmBlock<ArrivingRoles<Operand, Element, Rows, CopyWarp, kWeightKn>>;
  using Tiles = typename Block::Tiles;
  using Table = WorkTable<schedule::AgWork>;
  using Partials = PartialsMemory<Tiles>;
  static_assert(kMinHandWrittenK >= Tiles::kLead * Tiles::kStepOfK);
  using Params = typename Block::Params;
  static constexpr const char* kName = "hand-written fused ag_gemm";

 public:
  explicit Arriving(const FusedAgShape& shape)
      : shape_(shape),
        order_(arriving_order<Tiles, Rows>(shape, resident_clusters<Block>(kName),
                                           Partials::kPossible)),
        partials_(schedule::partial_slots(waves_of(order_), order_.split)) {
    for (const int head : shape.heads) {
      if (tables_.contains(head)) continue;
      schedule::AgWaveOrder order = order_;
      order.rows.head = head_columns(order.rows.column_tiles, head);
      tables_.emplace(head, Table(order));
    }
  }

  void launch(const FusedAgArgs& args, cudaStream_t stream) override {
    if (!last_ || !is_launched_alike(args, *last_)) prepare(args);
    launch_gemm<Block>(params_, order_.clusters, kName, stream);
  }
  RecordedTiles recorded_tiles() const override {
    if (!kDeviceTimeline) return {};
    return {order_.rows.row_tiles(), order_.rows.column_tiles};
  }

 private:
  void prepare(const FusedAgArgs& args) {
    Params params;
    const Table& table = tables_.at(args.head);
    const auto shards = schedule::shard_rows(shape_.m, shape_.ranks);
    params.local =
        map_of<Operand>(args.local, shards.count(shape_.rank), shape_.k, Tiles::kTileRows);
    params.gathered = map_of<Operand>(args.gathered, shape_.m, shape_.k, Tiles::kTileRows);
    params.weight = map_weight<Tiles>(args.weight, shape_.n, shape_.k);
    if constexpr (Rows::kAny) {
      for (int r = 0; r < shape_.ranks; ++r) {
        auto* rows = static_cast<Element*>(args.out) + shards.begin(r) * shape_.n;
        params.outs[r] = map_of<Element>(rows, shards.count(r), shape_.n, Tiles::kGroupRows);
      }
      params.shards = shards;
      params.longer = args.longer;
      params.bias = args.bias;
    } else {
      params.out = map_of<Element>(args.out, shape_.m, shape_.n, Tiles::kGroupRows);
    }
    params.partials = partials_.memory();
    params.work_items = table.data();
    params.items_of_cluster = table.of_cluster;
    params.rank = shape_.rank;
    params.shard_tiles = order_.rows.shard_tiles;
    params.steps = order_.steps;
    params.chunk_steps = args.arrivals.chunk_bytes / kStepBytes;
    params.scales = args.scales;
    params.columns = int(shape_.n);
    if constexpr (kDeviceTimeline) params.timeline = args.timeline;
    params.arrivals = args.arrivals;
    if constexpr (std::is_same_v<typename CopyWarp::Route, EncodedShardRoute>) {
      params.route = args.encoded;
    } else {
      params.route = args.route;
    }
    params.route.groups = std::min(params.route.groups, order_.clusters * Tiles::kCluster);
    params_ = params;
    last_ = args;
  }

  FusedAgShape shape_;
  schedule::AgWaveOrder order_;  // without a head
  std::map<int, Table> tables_;  // by head
  Partials partials_;
  Params params_{};
  std::optional<FusedAgArgs> last_;  // request that params_ were prepared for
};

}  // namespace tandem::gpu::fused
