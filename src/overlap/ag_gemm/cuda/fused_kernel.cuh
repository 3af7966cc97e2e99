// The CUTLASS AG+GEMM: CUTLASS's Hopper GEMM with two parts replaced. The tile scheduler reads
// schedule/ag_tile_order.h; the producer warp waits for each chunk of a tile's rows before it loads
// it, and reads the local shard in place through a second TMA descriptor. Copy warps, if used, take
// the place of a block's second loading warp, which CUTLASS has for scales.
//
// Two blocks of a cluster have the same rows of x, which they load together.
#pragma once

#include <cutlass/gemm/device/gemm_universal_adapter.h>
#include <cutlass/version.h>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>

#include <algorithm>
#include <cstring>
#include <optional>

#include "comm/device/device_signal.cuh"
#include "core/cuda/check.h"
#include "gemm/cuda/gemm_setup.cuh"
#include "gemm/cuda/tile_scheduler.cuh"
#include "gemm/cuda/tile_timeline.cuh"
#include "overlap/ag_gemm/cuda/fused.h"
#include "overlap/contract/cuda/wait_ids.h"
#include "overlap/gather/cuda/shard_arrivals.cuh"
#include "overlap/gather/cuda/shard_copy_warp.cuh"

namespace tandem::gpu::fused {

/// K-blocks from a given one: an iterator for CUTLASS's loading loop.
struct LoadStep {
  int at;
  CUTLASS_DEVICE int operator*() const { return at; }
  CUTLASS_DEVICE LoadStep& operator++() {
    ++at;
    return *this;
  }
};

/// CUTLASS's policy of a mainloop with work for a second loading warp.
template <class Base>
struct WithCopyWarps : Base {};

template <class Base>
struct GatedMainloop : Base {
  using DispatchPolicy = WithCopyWarps<typename Base::DispatchPolicy>;

  struct Arguments : Base::Arguments {
    const void* local = nullptr;  // this rank's rows, offset as rows of the whole matrix
    int shard_rows = 1, rank = 0;
    ShardArrivals arrivals;
    ShardRoute route;
  };
  struct Params : Base::Params {
    typename Base::Params local;
    int shard_tiles, rank;
    int chunk_tiles;  // k-blocks per chunk
    ShardArrivals arrivals;
    ShardRoute route;
  };
  struct TensorStorage : Base::TensorStorage {
    ShardCopyWarp::Storage copy_warp;
  };

  template <class Problem>
  static Params to_underlying_arguments(Problem const& problem, Arguments const& arguments,
                                        void* workspace) {
    typename Base::Arguments local = arguments;
    local.ptr_A = static_cast<typename Base::ElementA const*>(arguments.local);
    using Tile = typename Base::TileShape;
    constexpr int kStepBytes = int(cute::size<2>(Tile{}) * sizeof(typename Base::ElementA));
    return {Base::to_underlying_arguments(problem, arguments, workspace),
            Base::to_underlying_arguments(problem, local, workspace),
            arguments.shard_rows / int(cute::size<0>(Tile{})),
            arguments.rank,
            arguments.arrivals.chunk_bytes / kStepBytes,
            arguments.arrivals,
            arguments.route};
  }
  template <class Problem>
  static bool can_implement(Problem const& problem, Arguments const& arguments) {
    return Base::can_implement(problem, arguments);
  }
  // Called first by one thread of every block.
  CUTLASS_DEVICE static void prefetch_tma_descriptors(Params const& params) {
    Base::prefetch_tma_descriptors(params);
    Base::prefetch_tma_descriptors(params.local);
    if (params.route.targets > 0 && blockIdx.x + blockIdx.y == 0)
      ShardCopyWarp(params.route).enter();
  }

  template <class Inputs, class Iterator, class Coordinates>
  CUTLASS_DEVICE void load(Params const& params, typename Base::MainloopPipeline pipeline,
                           typename Base::PipelineState state, Inputs const& inputs,
                           Coordinates const& at, Iterator, int k_tiles, int thread,
                           uint32_t rank_in_cluster, typename Base::TensorStorage& tensors) {
    const bool first_tile = wanted_ == 0;
    if (first_tile) wanted_ = wanted(params.arrivals);
    const int shard = int(cute::get<0>(at)) / params.shard_tiles;
    if (shard == params.rank) {
      Base::load(params.local, pipeline, state, inputs, at, LoadStep{0}, k_tiles, thread,
                 rank_in_cluster, tensors);
    } else {
      const bool whole = here_ >> shard & 1;
      const Timestamps timestamps(params);
      timestamps.count(at, thread == 0, &TileRecord::waits);
      timestamps.stamp(at, thread == 0, &TileRecord::wait_begin);
      ArrivingSteps steps{params,
                          wanted_,
                          params.arrivals.arrived + shard * params.arrivals.chunks,
                          int(cute::get<0>(at)),
                          k_tiles,
                          whole ? k_tiles : params.chunk_tiles};
      if (!whole) steps.wait();
      __syncwarp();
      timestamps.stamp(at, thread == 0, &TileRecord::wait_end);
      Base::load(params, pipeline, state, inputs, at, steps, k_tiles, thread, rank_in_cluster,
                 tensors);
      here_ |= 1u << shard;
    }
    if (first_tile && params.route.targets > 0) {
      __syncwarp();
      if (thread == 0) {
        ShardCopyWarp(params.route)
            .finish_epoch_read(ShardCopyWarp::kReadersPerBlock * gridDim.x * gridDim.y);
      }
    }
  }

  // Called by a separate warp, for the block's first tile.
  template <class Inputs, class Iterator, class Coordinates>
  CUTLASS_DEVICE void load_auxiliary(Params const& params, typename Base::MainloopPipeline,
                                     typename Base::PipelineState, Inputs const&,
                                     Coordinates const&, Iterator, int, int thread, uint32_t,
                                     TensorStorage& tensors) {
    if (params.route.targets > 0) ShardCopyWarp(params.route).carry(thread, tensors.copy_warp);
    // The warp has no other work, and CUTLASS's loop would call it again. It may exit here only
    // because nothing after that loop needs it: no barrier of the block or of the cluster.
    static_assert(CUTLASS_MAJOR == 4 && CUTLASS_MINOR == 2 && CUTLASS_PATCH == 0,
                  "another CUTLASS: may the auxiliary loading warp still exit here?");
    asm volatile("exit;");
  }

 private:
  // LoadStep of a shard that arrives chunk by chunk: the loading thread waits for a chunk after it
  // has issued the last load of the previous one, while earlier loads are in flight.
  struct ArrivingSteps {
    Params const& params;
    uint64_t wanted;
    const uint64_t* arrived;  // flag of the next chunk
    int row;                  // row of the tile
    int end, next;            // k-blocks: end of the shard, and start of the next chunk
    int at = 0;

    CUTLASS_DEVICE int operator*() const { return at; }
    CUTLASS_DEVICE ArrivingSteps& operator++() {
      if (++at == next && at < end) {
        next += params.chunk_tiles;
        wait();
      }
      return *this;
    }
    CUTLASS_DEVICE void wait() {
      wait_for_load(arrived++, wanted, params.arrivals.deadline, kAgGemmWait,
                    row / params.shard_tiles, row);
    }
  };

  uint64_t wanted_ = 0;  // signal value in this call; 0: not read yet
  unsigned here_ = 0;    // shards that have completely arrived, a bit each
};

}  // namespace tandem::gpu::fused

namespace cutlass::gemm::kernel::detail {

template <class Base>
struct HasAuxiliaryLoad<tandem::gpu::fused::WithCopyWarps<Base>> : cute::true_type {};

}  // namespace cutlass::gemm::kernel::detail

namespace tandem::gpu::fused {

// `Schedule` is CUTLASS's: cooperative (two warpgroups share a tile) or pingpong (one tile each).
template <int kRows, int kColumns, class Schedule, class EpilogueSchedule>
class Kernel final : public FusedAgKernel {
  using Element = cutlass::bfloat16_t;
  using TileShape = cute::Shape<cute::Int<kRows>, cute::Int<kColumns>, cute::_64>;
  static constexpr int kClusterColumns = 2;
  using ClusterShape = cute::Shape<cute::_1, cute::Int<kClusterColumns>, cute::_1>;
  using Row = cutlass::layout::RowMajor;
  using Epilogue = EpilogueOnTimeline<typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, TileShape, ClusterShape,
      cutlass::epilogue::collective::EpilogueTileAuto, float, float, void, Row, 8, Element, Row, 8,
      EpilogueSchedule>::CollectiveOp>;
  using Mainloop =
      GatedMainloop<MainloopOnTimeline<typename cutlass::gemm::collective::CollectiveBuilder<
          cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, Row, 8, Element,
          cutlass::layout::ColumnMajor, 8, float, TileShape, ClusterShape,
          cutlass::gemm::collective::StageCountAutoCarveout<int(
              sizeof(typename Epilogue::SharedStorage) + sizeof(ShardCopyWarp::Storage))>,
          Schedule>::CollectiveOp>>;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<cutlass::gemm::kernel::GemmUniversal<
      cute::Shape<int, int, int, int>, Mainloop, Epilogue, TileOrderTag<schedule::AgTileOrder>>>;
  using GemmKernel = typename Gemm::GemmKernel;
  static_assert(GemmKernel::SharedStorageSize <=
                cutlass::gemm::collective::detail::sm90_smem_capacity_bytes);

 public:
  explicit Kernel(const FusedAgShape& shape) : shape_(shape) {}
  void launch(const FusedAgArgs& args, cudaStream_t stream) override {
    if (!last_ || !is_launched_alike(args, *last_)) prepare(args);
    // CUTLASS queries the device's limits once; later launches only enqueue.
    if (Gemm::run(params_, stream) != cutlass::Status::kSuccess) check_launch("fused ag_gemm");
  }
  RecordedTiles recorded_tiles() const override {
    if (!kDeviceTimeline) return {};
    return {int(shape_.m / kRows), kClusterColumns * cluster_columns()};
  }

 private:
  int cluster_columns() const {
    const int columns = int((shape_.n + kColumns - 1) / kColumns);
    return (columns + kClusterColumns - 1) / kClusterColumns;
  }

  void prepare(const FusedAgArgs& args) {
    const int shard_rows = int(shape_.m / shape_.ranks);
    typename Gemm::Arguments arguments{};
    set_operands<Gemm>(arguments, shape_.m, shape_.n, shape_.k, args.gathered, args.weight);
    auto& epilogue = arguments.epilogue;
    epilogue.thread.alpha = 1;
    epilogue.thread.beta = 0;
    epilogue.ptr_D = static_cast<typename GemmKernel::ElementD*>(args.out);
    epilogue.dD = cutlass::make_cute_packed_stride(typename GemmKernel::StrideD{},
                                                   {int(shape_.m), int(shape_.n), 1});
    auto& mainloop = arguments.mainloop;
    // The TMA descriptor of the local shard uses the whole matrix's row indices: its base is `rank`
    // shards before args.own, possibly before the allocation. Only tiles of the local shard use it,
    // so no address before args.own is ever accessed; the pointer itself is only computed and
    // encoded.
    mainloop.local =
        static_cast<const Element*>(args.local) - int64_t(shape_.rank) * shard_rows * shape_.k;
    mainloop.shard_rows = shard_rows;
    mainloop.rank = shape_.rank;
    mainloop.arrivals = args.arrivals;
    mainloop.route = args.route;
    const int columns = cluster_columns();
    if constexpr (kDeviceTimeline) {
      mainloop.timeline = {args.timeline.records, args.timeline.products,
                           kClusterColumns * columns};
      arguments.epilogue.timeline = mainloop.timeline;
    }
    const schedule::AgTileOrder order{shape_.rank, shape_.ranks, shard_rows / kRows, columns,
                                      head_columns(columns, args.head)};
    arguments.scheduler.order = order;
    // A cluster has two blocks; small shapes may have fewer blocks than groups.
    mainloop.route.groups = int(std::min<int64_t>(args.route.groups, 2 * order.tiles()));
    params_ = set_up<Gemm>(arguments, "ag_gemm: the fused kernel");
    last_ = args;
  }

  FusedAgShape shape_;
  typename Gemm::Params params_{};
  std::optional<FusedAgArgs> last_;  // request that params_ were prepared for
};

template <int kRows, int kColumns>
using Cooperative = Kernel<kRows, kColumns, cutlass::gemm::KernelTmaWarpSpecializedCooperative,
                           cutlass::epilogue::TmaWarpSpecializedCooperative>;
template <int kRows, int kColumns>
using Pingpong = Kernel<kRows, kColumns, cutlass::gemm::KernelTmaWarpSpecializedPingpong,
                        cutlass::epilogue::TmaWarpSpecialized>;

}  // namespace tandem::gpu::fused
