// The kernel of adding.h.
#pragma once

#include <map>
#include <optional>

#include "overlap/cuda/product_launch.cuh"
#include "overlap/gemm_rs/cuda/adding_block.cuh"

namespace tandem::gpu::fused {

template <class Element>
class Adding final : public AddingKernel {
  using Block = AddingBlock<Element>;
  using Params = typename Block::Params;
  using Lent = LentMemory<Block, Element>;
  static_assert(kLeastK >= Block::kLead * kStepOfK);
  static constexpr const char* kName = "adding gemm_rs";

 public:
  explicit Adding(const AddingShape& shape) : shape_(shape) {
    const int clusters = resident_clusters<Block>(kName);
    int lent = 0;
    for (const int pieces : kPieces) {
      if (column_tiles(shape.n) % pieces != 0) continue;
      const schedule::RsPieceOrder order = order_of(pieces, clusters);
      lent = std::max(lent, lent_places(waves_of(order), order.split));
      plans_.emplace(pieces, Plan{order, {order, kName}});
    }
    lent_.emplace(lent);
  }

  void launch(const AddingJob& job, cudaStream_t stream) override {
    if (!same(job)) prepare(job);
    launch_product<Block>(params_, params_.order.clusters, kName, stream);
  }

 private:
  struct Plan {
    schedule::RsPieceOrder order;
    WorkTable<schedule::PieceWork> works;
  };

  bool same(const AddingJob& job) const {
    return prepared_ && job.x == params_.job.x && job.weight == params_.job.weight &&
           job.out == params_.job.out && job.pieces == params_.job.pieces &&
           job.watch.deadline_ns == params_.job.watch.deadline_ns;
  }

  schedule::RsPieceOrder order_of(int pieces, int most_clusters) const {
    schedule::RsPieceOrder order;
    order.rank = shape_.rank;
    order.ranks = shape_.ranks;
    order.row_tiles = int(shape_.m / shape_.ranks / kRows);
    order.column_tiles = int(column_tiles(shape_.n));
    order.pieces = pieces;
    order.band = schedule::swept_rows(order.row_tiles, kSweptRows / kRows);
    order.steps = int((shape_.k + kStepOfK - 1) / kStepOfK);
    order.added = (order.ranks - 1) * Block::kStepsOfPart;
    order.least = Block::kLead;
    order.clusters = std::min(most_clusters, order.tiles());
    if (Lent::kPossible) order.split = best_split(waves_of(order));
    return order;
  }

  void prepare(const AddingJob& job) {
    constexpr int kHalf = Block::kTileColumns / Block::kCluster;
    Params params = params_;
    if (!prepared_ || job.pieces != params.job.pieces) lay_out(job, params);
    params.x = map_of<Element>(job.x, shape_.m, shape_.k, Block::kTileRows);
    params.weight = map_of<Element>(job.weight, shape_.n, shape_.k, kHalf);
    params.out = map_of<Element>(job.out, params.shard_rows, shape_.n, Block::kGroupRows);
    params.job = job;
    params_ = params;
    prepared_ = true;
  }

  // All that does not depend on the operands.
  void lay_out(const AddingJob& job, Params& params) const {
    const Plan& plan = plans_.at(job.pieces);
    const int64_t shard = shape_.m / shape_.ranks;
    const int64_t columns = int64_t(plan.order.piece_columns()) * Block::kTileColumns;
    const auto map = [&](const void* shards, int64_t rows) {
      return map_of<Element>(shards, rows * job.pieces, columns, Block::kGroupRows);
    };
    params.outbox = map(job.outbox, shape_.m);
    params.parts = map(job.parts, shape_.m - shard);
    params.lent = lent_->lent();
    params.shard_rows = int(shard);
    params.tiles_of_piece = unsigned(plan.order.piece_tiles()) * Block::kCluster * Block::kGroups;
    params.order = plan.order;
    params.works = plan.works.data();
    params.works_of_cluster = plan.works.of_cluster;
  }

  AddingShape shape_;
  std::map<int, Plan> plans_;  // by pieces
  std::optional<Lent> lent_;
  Params params_{};
  bool prepared_ = false;
};

}  // namespace tandem::gpu::fused
