// The fused GEMM+AR kernel: CUTLASS's Hopper main loop, then an epilogue that exchanges the tile.
// One warp loads, one warpgroup (two above 128 tokens) multiplies and exchanges. The weight passes
// through the pipeline once, and its stages use all remaining shared memory: that many bytes in
// flight are needed to saturate memory. Above 128 tokens a tile has half of them (kTokenTiles is 2)
// and twice the features, which minimizes the bytes that a block reads; a pair of blocks shares the
// weight.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/collective/sm90_mma_tma_gmma_ss_warpspecialized_fp8.hpp>
#include <cutlass/util/packed_stride.hpp>

#include <algorithm>
#include <iterator>
#include <type_traits>

#include "comm/device/device_signal.cuh"
#include "core/cuda/check.h"
#include "core/cuda/share.h"
#include "overlap/gemm_ar/cuda/exchange_tile.cuh"

namespace tandem::gpu::fused {

// ---- Configuration ------------------------------------------------------------------------------

template <class Operand_, class Element_, int kTokens_, int kCluster_>
struct ArConfig {
  using Operand = Operand_;
  using Element = Element_;  // dtype of the result
  static constexpr bool kFp8 = sizeof(Operand) == 1;
  static constexpr int kTokenTiles = kTokens_ <= ArStaging::kMaxTokens ? 1 : 2;  // tiles of tokens
  static constexpr int kTokens = kTokens_ / kTokenTiles;                         // per block
  static constexpr int kGroups = kTokenTiles, kFeatures = kGroups * ArStaging::kFeatures;
  static constexpr int kCluster = kCluster_ / kTokenTiles;  // blocks that share tokens
  static constexpr int kDepth = (kTokens <= 64 ? 256 : 128) / int(sizeof(Operand));  // a k-block
  static constexpr int kMultiplying = kGroups * ArStaging::kThreads, kThreads = kMultiplying + 32;
  using Exchange = ExchangeTile<Element, kTokens, kTokenTiles, kFp8>;
  using TileShape = cute::Shape<cute::Int<kFeatures>, cute::Int<kTokens>, cute::Int<kDepth>>;
  using ClusterShape = cute::Shape<cute::Int<kCluster>, cute::Int<kTokenTiles>, cute::_1>;
  static constexpr int kSharedBytes = 227 * 1024;
  static constexpr int kStageBytes =
      (kFeatures + kTokens) * kDepth * int(sizeof(Operand)) + 16;  // with two barriers
  static constexpr int kStages =
      (kSharedBytes - kGroups * int(sizeof(typename Exchange::Storage)) - 1024) / kStageBytes;
  // wgmmas, 32 bytes along K each, after which e4m3 accumulators are promoted to f32.
  static constexpr uint32_t kPromotionInstructions = kPromotionK * sizeof(Operand) / 32;
  static constexpr int kAligned = 16 / int(sizeof(Operand));
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Operand, cutlass::layout::RowMajor,
      kAligned, Operand, cutlass::layout::ColumnMajor, kAligned, float, TileShape, ClusterShape,
      cutlass::gemm::collective::StageCount<kStages>,
      std::conditional_t<kGroups == 1, cutlass::gemm::KernelTmaWarpSpecialized,
                         cutlass::gemm::KernelTmaWarpSpecializedCooperative>>::CollectiveOp;
  static_assert(int(cute::size(typename Mainloop::TiledMma{})) == kMultiplying);

  struct alignas(1024) Shared {
    typename Mainloop::TensorStorage tensors;
    typename Exchange::Storage exchange[kGroups];
    typename Mainloop::PipelineStorage pipeline;
  };
  static_assert(sizeof(Shared) <= kSharedBytes);

  struct Params {
    typename Mainloop::Params mainloop;
    cute::Shape<int, int, int, int> problem;  // features, tokens, K, 1
    FusedArArgs args;
  };
};

// ---- The kernel ---------------------------------------------------------------------------------

// All ranks' blocks, all of which are resident, process tiles in the same, rising order: the first
// tile that is unfinished on any rank is in progress on all. Tiles after the last one only pad a
// cluster.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    ar_kernel(const __grid_constant__ typename Config::Params params) {
  using Mainloop = typename Config::Mainloop;
  using Pipeline = typename Mainloop::MainloopPipeline;
  constexpr int kCluster = Config::kCluster, kTokenTiles = Config::kTokenTiles;
  constexpr uint32_t kEpochRead = Config::kGroups;  // a barrier after those of the groups
  extern __shared__ __align__(1024) char memory[];
  auto& shared = *reinterpret_cast<typename Config::Shared*>(memory);
  const int warp = cutlass::canonical_warp_idx_sync(), thread = int(threadIdx.x);
  const bool loads = warp == Config::kMultiplying / 32;
  if (loads && cute::elect_one_sync()) {
    // A programmatic dependent may start where SMs are free, but must wait for the end of this
    // kernel: reuse of the staging memory requires that calls do not overlap (ArStaging).
    asm volatile("griddepcontrol.launch_dependents;");
    Mainloop::prefetch_tma_descriptors(params.mainloop);
  }

  typename Pipeline::Params of_pipeline;
  of_pipeline.role =
      loads ? Pipeline::ThreadCategory::Producer : Pipeline::ThreadCategory::Consumer;
  of_pipeline.is_leader = loads;  // one of whose threads loads
  of_pipeline.num_consumers = Config::kMultiplying;
  of_pipeline.transaction_bytes = params.mainloop.tma_transaction_bytes;
  Pipeline pipeline(shared.pipeline, of_pipeline, typename Config::ClusterShape{});
  if constexpr (kCluster * kTokenTiles > 1) {
    cute::cluster_arrive_relaxed();
    cute::cluster_wait();
  } else {
    __syncthreads();
  }

  Mainloop mainloop;
  const int all_steps = (cute::get<2>(params.problem) + Config::kDepth - 1) / Config::kDepth;
  // Helpers along K precede the tile's main block, which waits for them.
  const int helpers = int(gridDim.z) - 1, slice = int(blockIdx.z);
  int first_step = 0, steps = all_steps;
  if (helpers > 0) {
    first_step = all_steps * slice / (helpers + 1);
    steps = all_steps * (slice + 1) / (helpers + 1) - first_step;
  }
  const int tiles = (cute::get<0>(params.problem) + Config::kFeatures - 1) / Config::kFeatures;
  const int all = (tiles + kCluster - 1) / kCluster * kCluster;

  // ---- Loads ------------------------------------------------------------------------------------

  if (loads) {
    auto state = cutlass::make_producer_start_state<Pipeline>();
    const auto operands = mainloop.load_init(params.problem, params.mainloop);
    for (int tile = int(blockIdx.x); tile < all; tile += int(gridDim.x)) {
      const auto all_along_k = cute::shape<3>(cute::get<0>(operands));
      const auto along_k =
          cute::make_coord_iterator(cute::idx2crd(first_step, all_along_k), all_along_k);
      mainloop.load(params.mainloop, pipeline, state, operands,
                    cute::make_coord(tile, int(blockIdx.y), cute::_, 0), along_k, steps,
                    thread % 32, cute::block_rank_in_cluster(), shared.tensors);
      state.advance(uint32_t(steps));
    }
    mainloop.load_tail(pipeline, state);
    __syncwarp();  // only one lane waited
    // Overlapped with the last tile's exchange: at the end of the kernel it would wait for the
    // atomic's reply.
    cutlass::arch::NamedBarrier::sync(Config::kThreads, kEpochRead);
    if (thread % 32 == 0) finish_epoch_read(params.args.calls, gridDim.x * gridDim.y * gridDim.z);
    return;
  }

  // ---- Multiply, exchange and store -------------------------------------------------------------

  typename Mainloop::PipelineState state;
  const uint64_t epoch = this_epoch(params.args.calls);
  const bool sends = !gave_up_before(params.args.calls, epoch);
  cutlass::arch::NamedBarrier::arrive(Config::kThreads, kEpochRead);
  const auto exchange = [&] {
    // Prevents values derived from the thread index from occupying registers through the main loop.
    int now = thread;
    asm volatile("" : "+r"(now));
    const int group = now / ArStaging::kThreads;
    return typename Config::Exchange(params.args, shared.exchange[group], group,
                                     now % ArStaging::kThreads, epoch);
  };
  for (int tile = int(blockIdx.x); tile < all; tile += int(gridDim.x)) {
    const int layout_tile =
        (tile * Config::kGroups + thread / ArStaging::kThreads) * kTokenTiles + blockIdx.y;
    const bool shares = sends && layout_tile < params.args.layout.tiles;
    if constexpr (Config::kFp8) {
      if (shares && slice == helpers) exchange().fetch_scales(layout_tile);
    }
    auto accumulators = cute::partition_fragment_C(typename Mainloop::TiledMma{},
                                                   cute::take<0, 2>(typename Config::TileShape{}));
    mainloop.mma(pipeline, state, accumulators, steps, thread, shared.tensors, params.mainloop);
    mainloop.mma_tail(pipeline, state, steps);
    state.advance(uint32_t(steps));
    if (!shares) continue;
    if (slice < helpers) {
      exchange().store_partial(layout_tile, slice, accumulators);
    } else {
      const bool whole = exchange().add_partials(layout_tile, helpers, accumulators);
      exchange().run(layout_tile, accumulators, whole);
    }
  }
}

// ---- Launch -------------------------------------------------------------------------------------

template <class Config>
class ArKernel final : public FusedArKernel {
  using Mainloop = typename Config::Mainloop;
  using Operand = typename Config::Operand;
  static constexpr auto* kKernel = ar_kernel<Config>;

 public:
  ArKernel() {
    check(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               int(sizeof(typename Config::Shared))),
          "fused gemm_ar: shared memory");
    cudaLaunchAttribute cluster;
    const cudaLaunchConfig_t config = launch_config(Config::kCluster, 1, nullptr, &cluster);
    check(cudaOccupancyMaxActiveClusters(&resident_, kKernel, &config),
          "fused gemm_ar: resident clusters");
    if (resident_ == 0) throw DeviceError("fused gemm_ar: not a block of it fits this GPU");
    resident_ = this_share()->clusters(resident_, Config::kCluster * Config::kTokenTiles);
  }

  int max_splits(int64_t n, int64_t k) const override {
    const int64_t steps = (k + Config::kDepth - 1) / Config::kDepth;
    const int64_t maximum = std::min<int64_t>(steps, kMaxArSplits);
    return int(std::clamp<int64_t>(resident_ / clusters(n), 1, maximum));
  }

  void launch(const FusedArArgs& args, cudaStream_t stream) override {
    if (!same(args)) prepare(args);
    params_.args = args;
    cudaLaunchAttribute cluster;
    const cudaLaunchConfig_t config = launch_config(blocks_, args.split, stream, &cluster);
    check(cudaLaunchKernelEx(&config, kKernel, params_), "fused gemm_ar");
  }

 private:
  static cudaLaunchConfig_t launch_config(int blocks, int split, cudaStream_t stream,
                                          cudaLaunchAttribute* cluster) {
    cluster->id = cudaLaunchAttributeClusterDimension;
    cluster->val.clusterDim = {unsigned(Config::kCluster), unsigned(Config::kTokenTiles), 1};
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(unsigned(blocks), unsigned(Config::kTokenTiles), unsigned(split));
    config.blockDim = dim3(unsigned(Config::kThreads));
    config.dynamicSmemBytes = sizeof(typename Config::Shared);
    config.stream = stream;
    config.attrs = cluster;
    config.numAttrs = 1;
    return config;
  }

  bool same(const FusedArArgs& args) const {
    return blocks_ > 0 && args.x == params_.args.x && args.weight == params_.args.weight;
  }

  void prepare(const FusedArArgs& args) {
    const int features = int(args.n), tokens = int(args.m), depth = int(args.k);
    params_.problem = {features, tokens, depth, 1};
    typename Mainloop::Arguments operands{};
    operands.ptr_A = static_cast<const Operand*>(args.weight);
    operands.dA =
        cutlass::make_cute_packed_stride(typename Mainloop::StrideA{}, {features, depth, 1});
    operands.ptr_B = static_cast<const Operand*>(args.x);
    operands.dB =
        cutlass::make_cute_packed_stride(typename Mainloop::StrideB{}, {tokens, depth, 1});
    if constexpr (Config::kFp8) operands.mma_promotion_interval = Config::kPromotionInstructions;
    params_.mainloop = Mainloop::to_underlying_arguments(params_.problem, operands, nullptr);
    blocks_ = int(std::min<int64_t>(clusters(features), resident_)) * Config::kCluster;
  }

  static int64_t clusters(int64_t features) {
    constexpr int64_t kWide = Config::kCluster * Config::kFeatures;
    return (features + kWide - 1) / kWide;
  }

  typename Config::Params params_{};
  int resident_ = 0;  // in clusters
  int blocks_ = 0;    // per launch and token tile; 0: no operands prepared
};

template <class Operand, class Element = Operand, int kIndex = 0>
std::unique_ptr<FusedArKernel> make_ar_kernel(FusedArTile tile) {
  if constexpr (kIndex < int(std::size(kFusedArTiles))) {
    constexpr FusedArTile kTile = kFusedArTiles[kIndex];
    if (tile.tokens == kTile.tokens && tile.cluster == kTile.cluster) {
      return std::make_unique<ArKernel<ArConfig<Operand, Element, kTile.tokens, kTile.cluster>>>();
    }
    return make_ar_kernel<Operand, Element, kIndex + 1>(tile);
  } else {
    throw InvalidArgument("gemm_ar: no fused kernel has this tile");
  }
}

}  // namespace tandem::gpu::fused
