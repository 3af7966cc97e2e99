// The CUTLASS GEMM+RS kernel: CUTLASS's Hopper GEMM with its tile order and its epilogue replaced.
#pragma once

#include <cutlass/gemm/device/gemm_universal_adapter.h>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>

#include <algorithm>

#include "core/cuda/check.h"
#include "gemm/cuda/gemm_setup.cuh"
#include "gemm/cuda/tile_scheduler.cuh"
#include "overlap/gemm_rs/cuda/scatter_epilogue.cuh"

namespace tandem::gpu::fused {

// CUTLASS's cooperative kernel: two warpgroups share a tile, wide enough that its operands can be
// read from shared memory at the tensor cores' rate. kDirect: its pingpong kernel: each warpgroup
// has a tile, and one's epilogue overlaps the other's main loop. Two blocks share the reads of one
// operand: the rows' (kClusterRows = 1) or the columns' (2), which requires a shard with an even
// number of rows of tiles.
template <class Element, int kColumns, int kClusterRows, bool kDirect = false>
class RsKernel final : public CutlassRsKernel {
  static constexpr int kRows = kWarpgroup;
  using TileShape = cute::Shape<cute::Int<kRows>, cute::Int<kColumns>, cute::_64>;
  static constexpr int kClusterColumns = 2 / kClusterRows;
  using ClusterShape = cute::Shape<cute::Int<kClusterRows>, cute::Int<kClusterColumns>, cute::_1>;
  using Row = cutlass::layout::RowMajor;
  using Epilogue = ScatterEpilogue<
      typename cutlass::epilogue::collective::CollectiveBuilder<
          cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, TileShape, ClusterShape,
          cutlass::epilogue::collective::EpilogueTileAuto, float, float, Element, Row, 8, Element,
          Row, 8, cutlass::epilogue::NoSmemWarpSpecialized>::CollectiveOp,
      Element, kColumns, kDirect>;
  using Schedule = std::conditional_t<kDirect, cutlass::gemm::KernelTmaWarpSpecializedPingpong,
                                      cutlass::gemm::KernelTmaWarpSpecializedCooperative>;
  using Mainloop = MainloopOnTimeline<typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, Row, 8, Element,
      cutlass::layout::ColumnMajor, 8, float, TileShape, ClusterShape,
      cutlass::gemm::collective::StageCountAutoCarveout<int(
          sizeof(typename Epilogue::TensorStorage))>,
      Schedule>::CollectiveOp>;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<cutlass::gemm::kernel::GemmUniversal<
      cute::Shape<int, int, int, int>, Mainloop, Epilogue, TileOrderTag<schedule::RsTileOrder>>>;
  using GemmKernel = typename Gemm::GemmKernel;
  static_assert(GemmKernel::SharedStorageSize <=
                cutlass::gemm::collective::detail::sm90_smem_capacity_bytes);
  // The sender must leave shared memory for enough stages.
  static_assert(Mainloop::DispatchPolicy::Stages >= 4);

 public:
  void launch(const CutlassRsArgs& args, cudaStream_t stream) override {
    if (!same(args)) prepare(args);
    // CUTLASS queries the device's limits once; later launches only enqueue.
    if (Gemm::run(params_, stream) != cutlass::Status::kSuccess) check_launch("CUTLASS gemm_rs");
  }
  int tiles(int64_t shard_rows, int64_t columns) const override {
    return int(shard_rows / kRows) * column_tiles(columns);
  }
  size_t tile_bytes() const override { return size_t(kRows) * kColumns * sizeof(Element); }
  RecordedTiles recorded_tiles(int64_t m, int64_t n) const override {
    if (!kDeviceTimeline) return {};
    return {int(m / kRows), kClusterColumns * cluster_columns(n)};
  }

 private:
  static int column_tiles(int64_t n) { return int((n + kColumns - 1) / kColumns); }
  static int cluster_columns(int64_t n) {
    return (column_tiles(n) + kClusterColumns - 1) / kClusterColumns;
  }

  bool same(const CutlassRsArgs& args) const {
    return prepared_ && args.x == last_.x && args.weight == last_.weight && args.out == last_.out &&
           args.pace == last_.pace && args.timeline.records == last_.timeline.records &&
           args.deadline.deadline_ns == last_.deadline.deadline_ns;
  }

  void prepare(const CutlassRsArgs& args) {
    const int ranks = args.staging.size, rank = args.staging.rank;
    const int shard_rows = int(args.m / ranks), shard_tiles = shard_rows / kRows;
    const int row_clusters = shard_tiles / kClusterRows, column_clusters = cluster_columns(args.n);
    typename Gemm::Arguments arguments{};
    set_operands<Gemm>(arguments, args.m, args.n, args.k, args.x, args.weight);
    const int sms = arguments.hw_info.sm_count;
    Scatter& scatter = arguments.epilogue.scatter;
    scatter.staging = args.staging;
    scatter.send_buffer = args.send_buffer;
    scatter.slot_bytes = args.slot_bytes;
    scatter.ready_flags = args.ready_flags;
    scatter.arrived_tiles = args.arrived_tiles;
    scatter.tiles_of_slot = args.tiles_of_slot;
    scatter.calls = args.calls;
    scatter.shard_tiles = shard_tiles;
    scatter.column_tiles = column_tiles(args.n);
    scatter.cluster_rows = kClusterRows;
    scatter.cluster_columns = kClusterColumns;
    scatter.all_tiles = unsigned(ranks * shard_tiles * column_clusters * kClusterColumns);
    scatter.out = args.out;
    scatter.n = int(args.n);
    // Bytes / (GB/s) = ns. Assumes that all SMs send at once and share the link evenly; if fewer
    // send, each keeps to its share.
    scatter.pace_ns =
        args.pace > 0 ? int(PacedBulkCopier::kChunk * sms * 100.0 / (kLinkGBs * args.pace)) : 0;
    scatter.deadline = args.deadline;
    if constexpr (kDeviceTimeline) {
      arguments.mainloop.timeline = {args.timeline.records, args.timeline.products,
                                     kClusterColumns * column_clusters};
      arguments.epilogue.timeline = arguments.mainloop.timeline;
    }
    // Rows of tiles of a raster group, sized so that its working set fits L2: the largest divisor,
    // where schedule::swept_rows only halves. Kept as measured; the other choice would change the
    // send order if the rows of tiles are not a power of two.
    const auto band = [&](int shards) {
      int longest = 1;
      for (int rows = 1; rows <= row_clusters; ++rows) {
        const bool fits = rows * kClusterRows * kRows * shards <= schedule::kSweptRows;
        if (fits && row_clusters % rows == 0) longest = rows;
      }
      return longest;
    };
    const schedule::RsTileOrder order{rank,        ranks,  row_clusters, column_clusters,
                                      band(ranks), band(1)};
    arguments.scheduler.order = order;
    scatter.order = order;
    params_ = set_up<Gemm>(arguments, "gemm_rs: the fused_cutlass kernel");
    last_ = args;
    prepared_ = true;
  }

  typename Gemm::Params params_{};
  CutlassRsArgs last_{};
  bool prepared_ = false;
};

}  // namespace tandem::gpu::fused
