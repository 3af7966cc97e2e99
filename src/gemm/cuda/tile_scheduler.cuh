// CUTLASS's persistent tile scheduler with the tile order replaced by one of
// schedule/*_tile_order.h. The order counts in clusters; cluster c of the grid takes positions c, c
// + clusters, ...
#pragma once

#include <cutlass/gemm/kernel/tile_scheduler.hpp>

#include "schedule/tile.h"

namespace tandem::gpu::fused {

// Tag that names TileScheduler to CUTLASS's selector.
template <class Order>
struct TileOrderTag {};

template <class Order>
class TileScheduler : public cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90 {
  using Base = cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90;

 public:
  struct Arguments : Base::Arguments {
    Order order;  // counts in clusters
  };
  struct Params : Base::Params {
    Order order;
    int cluster_rows = 1, cluster_columns = 1;
  };
  using WorkTileInfo = Base::WorkTileInfo;

  template <class Problem, class TileShape, class ClusterShape>
  static Params to_underlying_arguments(Problem problem, TileShape tile, ClusterShape cluster,
                                        cutlass::KernelHardwareInfo const& hardware,
                                        Arguments const& arguments, void* workspace = nullptr,
                                        uint32_t subtile = 1, uint32_t alignment = 1) {
    Params params;
    static_cast<Base::Params&>(params) = Base::to_underlying_arguments(
        problem, tile, cluster, hardware, arguments, workspace, subtile, alignment);
    params.order = arguments.order;
    params.cluster_rows = int(cute::size<0>(cluster));
    params.cluster_columns = int(cute::size<1>(cluster));
    return params;
  }

  CUTLASS_DEVICE explicit TileScheduler(Params const& params) : Base(params), params_(params) {
    const dim3 id = cute::cluster_id_in_grid(), grid = cute::cluster_grid_dims();
    at_ = int(id.x + id.y * grid.x);
    step_ = int(grid.x * grid.y);
  }

  template <class ClusterShape>
  CUTLASS_DEVICE WorkTileInfo initial_work_tile_info(ClusterShape) {
    return get_current_work();
  }
  CUTLASS_DEVICE WorkTileInfo get_current_work() const { return work_at(at_); }
  CUTLASS_DEVICE void advance_to_next_work(uint32_t count = 1) { at_ += step_ * int(count); }
  CUTLASS_DEVICE bool is_last_tile(WorkTileInfo&, uint32_t count = 1) const {
    return !work_at(at_ + step_ * int(count)).is_valid();
  }
  CUTLASS_DEVICE auto fetch_next_work(WorkTileInfo) {
    advance_to_next_work();
    return cute::make_tuple(get_current_work(), true);
  }
  template <class SchedulerPipeline, class State>
  CUTLASS_DEVICE auto fetch_next_work(WorkTileInfo work, SchedulerPipeline&, State) {
    return fetch_next_work(work);
  }

 private:
  CUTLASS_DEVICE WorkTileInfo work_at(int at) const {
    if (at >= int(params_.order.tiles())) return WorkTileInfo::invalid_work_tile();
    const schedule::Tile tile = tile_at(params_.order, at);
    const dim3 in_cluster = cute::block_id_in_cluster();
    return {tile.row * params_.cluster_rows + int(in_cluster.x),
            tile.column * params_.cluster_columns + int(in_cluster.y), 0, true};
  }

  Params const& params_;
  int at_, step_;
};

}  // namespace tandem::gpu::fused

namespace cutlass::gemm::kernel::detail {

template <class Order, class ArchTag, class TileShape, class ClusterShape, uint32_t kStages>
struct TileSchedulerSelector<tandem::gpu::fused::TileOrderTag<Order>, ArchTag, TileShape,
                             ClusterShape, kStages> {
  using Scheduler = tandem::gpu::fused::TileScheduler<Order>;
};

}  // namespace cutlass::gemm::kernel::detail
