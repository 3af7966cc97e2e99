// The fused kernel: CUTLASS's Hopper GEMM with two of its parts replaced. The tile scheduler reads
// schedule/ag_tile_order.h; the producer warp waits for a tile's shard before it loads the rows,
// and takes the own shard from where it lies through a second TMA descriptor.
#pragma once

#include <cutlass/gemm/device/gemm_universal_adapter.h>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>
#include <cutlass/util/packed_stride.hpp>

#include <algorithm>
#include <cstring>

#include "comm/nccl/device_signal.cuh"
#include "core/cuda/check.h"
#include "overlap/ag_gemm/cuda/fused.h"
#include "overlap/cuda/tile_scheduler.cuh"
#include "overlap/cuda/tile_timeline.cuh"

namespace tandem::gpu::fused {

template <class Base>
struct GatedMainloop : Base {
  struct Arguments : Base::Arguments {
    const void* own = nullptr;  // this rank's rows, as if the whole matrix began before them
    int shard_rows = 1, rank = 0;
    const uint64_t* arrived = nullptr;
    const uint64_t* epoch = nullptr;
    Watch watch;
  };
  struct Params : Base::Params {
    typename Base::Params own;
    int shard_tiles, rank;
    const uint64_t* arrived;
    const uint64_t* epoch;
    Watch watch;
  };

  template <class Problem>
  static Params to_underlying_arguments(Problem const& problem, Arguments const& arguments,
                                        void* workspace) {
    typename Base::Arguments own = arguments;
    own.ptr_A = static_cast<typename Base::ElementA const*>(arguments.own);
    return {Base::to_underlying_arguments(problem, arguments, workspace),
            Base::to_underlying_arguments(problem, own, workspace),
            arguments.shard_rows / int(cute::size<0>(typename Base::TileShape{})),
            arguments.rank,
            arguments.arrived,
            arguments.epoch,
            arguments.watch};
  }
  template <class Problem>
  static bool can_implement(Problem const& problem, Arguments const& arguments) {
    return Base::can_implement(problem, arguments);
  }
  CUTLASS_DEVICE static void prefetch_tma_descriptors(Params const& params) {
    Base::prefetch_tma_descriptors(params);
    Base::prefetch_tma_descriptors(params.own);
  }

  template <class Inputs, class Iterator, class Coordinates>
  CUTLASS_DEVICE void load(Params const& params, typename Base::MainloopPipeline pipeline,
                           typename Base::PipelineState state, Inputs const& inputs,
                           Coordinates const& at, Iterator k_tile, int k_tiles, int thread,
                           uint32_t rank_in_cluster, typename Base::TensorStorage& tensors) {
    const int shard = int(cute::get<0>(at)) / params.shard_tiles;
    if (shard == params.rank) {
      Base::load(params.own, pipeline, state, inputs, at, k_tile, k_tiles, thread, rank_in_cluster,
                 tensors);
      return;
    }
    const Stamps stamps(params);
    stamps.count(at, thread, &TileRecord::waits);
    stamps.stamp(at, thread, &TileRecord::wait_begin);
    wait_signal(params.arrived + shard, *params.epoch, params.watch, OpId::ag_gemm, shard,
                int(cute::get<0>(at)));
    stamps.stamp(at, thread, &TileRecord::wait_end);
    // The rows were seen by ordinary loads; TMA reads through another path.
    asm volatile("fence.proxy.async;" ::: "memory");
    __syncwarp();
    Base::load(params, pipeline, state, inputs, at, k_tile, k_tiles, thread, rank_in_cluster,
               tensors);
  }
};

// `Schedule` is CUTLASS's: cooperative (two warpgroups share a tile) or pingpong (one tile each).
template <int kRows, int kColumns, class Schedule, class EpilogueSchedule>
class Kernel final : public FusedAgKernel {
  using Element = cutlass::bfloat16_t;
  using TileShape = cute::Shape<cute::Int<kRows>, cute::Int<kColumns>, cute::_64>;
  using ClusterShape = cute::Shape<cute::_1, cute::_2, cute::_1>;
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
              sizeof(typename Epilogue::SharedStorage))>,
          Schedule>::CollectiveOp>>;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<cutlass::gemm::kernel::GemmUniversal<
      cute::Shape<int, int, int, int>, Mainloop, Epilogue, TileOrderTag<schedule::AgTileOrder>>>;
  using GemmKernel = typename Gemm::GemmKernel;

 public:
  void launch(const FusedAgJob& job, cudaStream_t stream) override {
    if (!same(job)) prepare(job);
    // CUTLASS asks the device's limits once; later launches only enqueue.
    if (Gemm::run(params_, stream) != cutlass::Status::kSuccess) check_launch("fused ag_gemm");
  }
  RecordedTiles recorded_tiles(int64_t m, int64_t n) const override {
    if (!kDeviceTimeline) return {};
    return {int(m / kRows), 2 * cluster_columns(n)};
  }

 private:
  static int cluster_columns(int64_t n) {
    const int columns = int((n + kColumns - 1) / kColumns);
    return (columns + 1) / 2;
  }

  bool same(const FusedAgJob& job) const {
    return prepared_ && job.m == last_.m && job.n == last_.n && job.k == last_.k &&
           job.own == last_.own && job.weight == last_.weight && job.out == last_.out &&
           job.head == last_.head && job.timeline.records == last_.timeline.records &&
           job.watch.deadline_ns == last_.watch.deadline_ns;
  }

  void prepare(const FusedAgJob& job) {
    const int shard_rows = int(job.m / job.ranks);
    typename Gemm::Arguments arguments{};
    arguments.mode = cutlass::gemm::GemmUniversalMode::kGemm;
    arguments.problem_shape = {int(job.m), int(job.n), int(job.k), 1};
    auto& mainloop = arguments.mainloop;
    mainloop.ptr_A = static_cast<const Element*>(job.gathered);
    mainloop.dA = cutlass::make_cute_packed_stride(typename GemmKernel::StrideA{},
                                                   {int(job.m), int(job.k), 1});
    mainloop.ptr_B = static_cast<const Element*>(job.weight);
    mainloop.dB = cutlass::make_cute_packed_stride(typename GemmKernel::StrideB{},
                                                   {int(job.n), int(job.k), 1});
    // Only tiles of the own shard go through this descriptor; what lies before it is never read.
    mainloop.own = static_cast<const Element*>(job.own) - int64_t(job.rank) * shard_rows * job.k;
    mainloop.shard_rows = shard_rows;
    mainloop.rank = job.rank;
    mainloop.arrived = job.arrived;
    mainloop.epoch = job.epoch;
    mainloop.watch = job.watch;
    arguments.epilogue.thread.alpha = 1;
    arguments.epilogue.thread.beta = 0;
    arguments.epilogue.ptr_D = static_cast<Element*>(job.out);
    arguments.epilogue.dD = cutlass::make_cute_packed_stride(typename GemmKernel::StrideD{},
                                                             {int(job.m), int(job.n), 1});
    const int columns = cluster_columns(job.n);
    arguments.scheduler.order = {job.rank, job.ranks, shard_rows / kRows, columns,
                                 (columns * job.head + 7) / 8};
    if constexpr (kDeviceTimeline) {
      mainloop.timeline = {job.timeline.records, job.timeline.products, 2 * columns};
      arguments.epilogue.timeline = mainloop.timeline;
    }
    int device = 0;
    check(cudaGetDevice(&device), "current device");
    check(
        cudaDeviceGetAttribute(&arguments.hw_info.sm_count, cudaDevAttrMultiProcessorCount, device),
        "multiprocessors");
    arguments.hw_info.device_id = device;
    if (Gemm::can_implement(arguments) != cutlass::Status::kSuccess) {
      throw Unsupported("ag_gemm: the fused kernel does not take this shape");
    }
    Gemm gemm;
    if (gemm.initialize(arguments) != cutlass::Status::kSuccess) {
      throw DeviceError("ag_gemm: the fused kernel could not be set up");
    }
    params_ = gemm.params();
    last_ = job;
    prepared_ = true;
  }

  typename Gemm::Params params_{};
  FusedAgJob last_{};
  bool prepared_ = false;
};

template <int kRows, int kColumns>
using Cooperative = Kernel<kRows, kColumns, cutlass::gemm::KernelTmaWarpSpecializedCooperative,
                           cutlass::epilogue::TmaWarpSpecializedCooperative>;
template <int kRows, int kColumns>
using Pingpong = Kernel<kRows, kColumns, cutlass::gemm::KernelTmaWarpSpecializedPingpong,
                        cutlass::epilogue::TmaWarpSpecialized>;

}  // namespace tandem::gpu::fused
