// The kernel of adding.h.
#pragma once

#include <algorithm>
#include <optional>
#include <vector>

#include "gemm/cuda/product_launch.cuh"
#include "overlap/gemm_rs/cuda/adding_block.cuh"

namespace tandem::gpu::fused {

template <class Operand, class Element, class Rows = WholeTiles>
class Adding final : public AddingKernel {
  using Block = AddingBlock<Operand, Element, Rows>;
  using Params = typename Block::Params;
  using Partials = PartialsMemory<Block, Element>;
  static_assert(Block::kTileColumns == AddingShape::tile_columns(dtype_of<Operand>()));
  static_assert(kLeastK >= Block::kLead * Block::kStepOfK);
  static_assert(std::ranges::all_of(kAddingPlans, [](const AddingPlan& plan) {
    return plan.pieces <= kMostPieces &&
           (plan.pieces > 0) + int(plan.between) + (plan.later > 0) <= 1;
  }));
  static constexpr const char* kName = "adding gemm_rs";

 public:
  explicit Adding(const AddingShape& shape)
      : shape_(shape), shards_(schedule::shard_rows(shape.m, shape.ranks)) {
    const int clusters = resident_clusters<Block>(kName);
    int slots = 0;
    for (const AddingPlan& plan : kAddingPlans) {
      const schedule::RsPieceOrder order = order_of(plan, clusters);
      // The same on all ranks, whose GPUs are of a kind.
      if (plan.pieces > 0 && order.column_tiles % plan.pieces != 0) continue;
      if (plan.between && (order.clusters >= order.shard_tiles() || order.shorter > 0)) continue;
      if (Rows::kAny && plan.pieces > 0) continue;
      if (plan.later > order.shard_tiles()) continue;
      slots = std::max(slots, partial_slots(waves_of(order), order.split));
      plans_.push_back(plan);
      layouts_.push_back({order, Works(schedule::RsPieces(order))});
    }
    partials_.emplace(slots);
  }

  const std::vector<AddingPlan>& plans() const override { return plans_; }

  RecordedTiles recorded_tiles() const override {
    if (!kDeviceTimeline) return {};
    return {int(shape_.ranks * shape_.shard_rows() / Block::kTileRows), int(shape_.column_tiles())};
  }

  void launch(const AddingJob& job, cudaStream_t stream) override {
    if (!same(job)) prepare(job);
    launch_product<Block>(params_, params_.order.clusters, kName, stream);
  }

 private:
  using Works = WorkTable<schedule::PieceWork>;
  struct Layout {
    schedule::RsPieceOrder order;
    Works works;
  };

  bool same(const AddingJob& job) const {
    return prepared_ && job.x == params_.job.x && job.weight == params_.job.weight &&
           job.out == params_.job.out && job.scales == params_.job.scales &&
           job.bias == params_.job.bias && job.plan == params_.job.plan &&
           job.watch.deadline_ns == params_.job.watch.deadline_ns &&
           job.timeline.records == params_.job.timeline.records;
  }

  schedule::RsPieceOrder order_of(const AddingPlan& plan, int most_clusters) const {
    const int shorter =
        schedule::shards_with_fewer_tiles(shards_, shape_.ranks, AddingShape::kRows);
    return adding_order<Block>(shape_, plan, most_clusters, Partials::kPossible, shorter,
                               Rows::kAny);
  }

  void prepare(const AddingJob& job) {
    constexpr int kHalf = Block::kTileColumns / Block::kCluster;
    Params params = params_;
    if (!prepared_ || job.plan != params.job.plan) lay_out(job, params);
    params.x = map_of<Operand>(job.x, shape_.m, shape_.k, Block::kTileRows);
    params.weight = map_of<Operand>(job.weight, shape_.n, shape_.k, kHalf);
    params.out = map_of<Element>(job.out, shards_.count(shape_.rank), shape_.n, Block::kGroupRows);
    params.job = job;
    if constexpr (kDeviceTimeline) params.timeline = job.timeline;
    params_ = params;
    prepared_ = true;
  }

  // All that does not depend on the operands.
  void lay_out(const AddingJob& job, Params& params) const {
    const Layout& layout = layouts_[size_t(job.plan)];
    const int64_t shard = shape_.shard_rows();
    const auto map = [&](const void* shards, int64_t rows) {
      return map_of<Element>(shards, rows * shape_.column_tiles(), Block::kTileColumns,
                             Block::kGroupRows);
    };
    params.outbox = map(job.outbox, shape_.ranks * shard);
    params.received = map(job.received, (shape_.ranks - 1) * shard);
    for (int rank = 0; rank < shape_.ranks; ++rank) {
      params.peers[rank] = map(job.staging.memory[rank], (shape_.ranks - 1) * shard);
    }
    params.partials = partials_->memory();
    params.shard_rows = int(shard);
    params.tiles_of_piece = unsigned(layout.order.piece_tiles()) * Block::kSlices;
    params.order = layout.order;
    params.works = layout.works.data();
    params.works_of_cluster = layout.works.of_cluster;
    params.slices_of_shard = int(shape_.slices());
    params.columns = int(shape_.n);
    params.scaled_by_row = shape_.scaled_by_row;
    params.every = steps_between_boxes<Block>(layout.order);
    if constexpr (Rows::kAny) params.shards = shards_;
  }

  AddingShape shape_;
  schedule::ShardRows shards_;
  std::vector<AddingPlan> plans_;
  std::vector<Layout> layouts_;  // by plan
  std::optional<Partials> partials_;
  Params params_{};
  bool prepared_ = false;
};

}  // namespace tandem::gpu::fused
