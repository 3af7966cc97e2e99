// The kernel of adding.h.
#pragma once

#include <algorithm>
#include <optional>
#include <vector>

#include "overlap/cuda/product_launch.cuh"
#include "overlap/gemm_rs/cuda/adding_block.cuh"

namespace tandem::gpu::fused {

template <class Element>
class Adding final : public AddingKernel {
  using Block = AddingBlock<Element>;
  using Params = typename Block::Params;
  using Lent = LentMemory<Block, Element>;
  static_assert(kLeastK >= Block::kLead * kStepOfK);
  static_assert(std::ranges::all_of(kAddingPlans, [](const AddingPlan& plan) {
    return plan.senders % Block::kCluster == 0 && (plan.senders == 0 || plan.pieces == 1);
  }));
  static constexpr const char* kName = "adding gemm_rs";

 public:
  explicit Adding(const AddingShape& shape)
      : shape_(shape),
        computed_(size_t(slices(shape.m - shape.m / shape.ranks, shape.n)) * sizeof(uint64_t)) {
    const int clusters = resident_clusters<Block>(kName);
    int lent = 0;
    for (const AddingPlan& plan : kAddingPlans) {
      const int senders = plan.senders / Block::kCluster;
      if (column_tiles(shape.n) % plan.pieces != 0 || senders >= clusters) continue;
      const schedule::RsPieceOrder order = order_of(plan, clusters - senders);
      lent = std::max(lent, lent_places(waves_of(order), order.split));
      plans_.push_back(plan);
      layouts_.push_back({order, {order, kName}});
    }
    lent_.emplace(lent);
    lay_out_slices();
  }

  const std::vector<AddingPlan>& plans() const override { return plans_; }

  void launch(const AddingJob& job, cudaStream_t stream) override {
    if (!same(job)) prepare(job);
    const int senders = plans_[size_t(job.plan)].senders / Block::kCluster;
    launch_product<Block>(params_, params_.order.clusters + senders, kName, stream);
  }

 private:
  struct Layout {
    schedule::RsPieceOrder order;
    WorkTable<schedule::PieceWork> works;
  };

  bool same(const AddingJob& job) const {
    return prepared_ && job.x == params_.job.x && job.weight == params_.job.weight &&
           job.out == params_.job.out && job.plan == params_.job.plan &&
           job.watch.deadline_ns == params_.job.watch.deadline_ns;
  }

  schedule::RsPieceOrder order_of(const AddingPlan& plan, int most_clusters) const {
    schedule::RsPieceOrder order;
    order.rank = shape_.rank;
    order.ranks = shape_.ranks;
    order.row_tiles = int(shape_.m / shape_.ranks / kRows);
    order.column_tiles = int(column_tiles(shape_.n));
    order.pieces = plan.pieces;
    order.band = schedule::swept_rows(order.row_tiles, kSweptRows / kRows);
    order.steps = int((shape_.k + kStepOfK - 1) / kStepOfK);
    order.added = (order.ranks - 1) * Block::kStepsOfPart;
    order.least = Block::kLead;
    order.clusters = std::min(most_clusters, order.tiles());
    if (Lent::kPossible) order.split = best_split(waves_of(order));
    return order;
  }

  // Of the others' tiles, in the order of all plans that send them.
  void lay_out_slices() {
    const schedule::RsPieceOrder order = order_of({}, 1);
    const int others = order.tiles() - order.row_tiles * order.column_tiles;
    std::vector<schedule::Slice> slices;
    for (int at = 0; at < others * Block::kSlices; ++at) {
      slices.push_back(slice_at(order, Block::kSlices, at));
    }
    slices_ = on_device(slices, kName);
  }

  void prepare(const AddingJob& job) {
    constexpr int kHalf = Block::kTileColumns / Block::kCluster;
    Params params = params_;
    if (!prepared_ || job.plan != params.job.plan) lay_out(job, params);
    params.x = map_of<Element>(job.x, shape_.m, shape_.k, Block::kTileRows);
    params.weight = map_of<Element>(job.weight, shape_.n, shape_.k, kHalf);
    params.out = map_of<Element>(job.out, params.shard_rows, shape_.n, Block::kGroupRows);
    params.job = job;
    params_ = params;
    prepared_ = true;
  }

  // All that does not depend on the operands.
  void lay_out(const AddingJob& job, Params& params) const {
    const Layout& layout = layouts_[size_t(job.plan)];
    const int64_t shard = shape_.m / shape_.ranks;
    const auto map = [&](const void* shards, int64_t rows) {
      return map_of<Element>(shards, rows * column_tiles(shape_.n), kColumns, Block::kGroupRows);
    };
    params.outbox = map(job.outbox, shape_.m);
    params.parts = map(job.parts, shape_.m - shard);
    params.lent = lent_->lent();
    params.shard_rows = int(shard);
    params.tiles_of_piece = unsigned(layout.order.piece_tiles()) * Block::kSlices;
    params.order = layout.order;
    params.works = layout.works.data();
    params.works_of_cluster = layout.works.of_cluster;
    params.outgoing = {plans_[size_t(job.plan)].senders, int(slices(shard, shape_.n)),
                       int(slices_.bytes() / sizeof(schedule::Slice)),
                       reinterpret_cast<const schedule::Slice*>(slices_.data()),
                       reinterpret_cast<uint64_t*>(computed_.data())};
  }

  AddingShape shape_;
  std::vector<AddingPlan> plans_;
  std::vector<Layout> layouts_;  // by plan
  std::optional<Lent> lent_;
  DeviceMemory slices_, computed_;
  Params params_{};
  bool prepared_ = false;
};

}  // namespace tandem::gpu::fused
