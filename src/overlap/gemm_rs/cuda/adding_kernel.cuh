// The kernel of adding.h.
#pragma once

#include <algorithm>
#include <map>
#include <type_traits>
#include <vector>

#include "core/cuda/check.h"
#include "core/cuda/handles.h"
#include "overlap/gemm_rs/cuda/adding_block.cuh"

namespace tandem::gpu::fused {

template <class Block>
__global__ __launch_bounds__(Block::kThreads, 1)
    __cluster_dims__(Block::kCluster, 1,
                     1) void adding_rs(const __grid_constant__ typename Block::Params params) {
  extern __shared__ std::byte memory[];
  Block::run(params, memory);
}

template <class Element>
class Adding final : public AddingKernel {
  using Block = AddingBlock<Element>;
  using Params = typename Block::Params;
  static constexpr bool kIsHalf = std::is_same_v<Element, __half>;

 public:
  explicit Adding(const AddingShape& shape) : shape_(shape), most_clusters_(resident_clusters()) {
    for (const int pieces : kPieces) {
      if (column_tiles(shape.n) % pieces == 0) plans_.emplace(pieces, plan(pieces));
    }
    for (const auto& [pieces, plan] : plans_) {
      if (plan.order.split.served == 0) continue;
      lent_places_ = std::max(lent_places_, last_wave(plan.order) * plan.order.split.helpers);
    }
    lent_ = DeviceMemory(size_t(lent_rows()) * Block::kTileColumns * sizeof(Element));
    lent_count_ = DeviceMemory(size_t(lent_places_ * Block::kCluster) * sizeof(uint64_t));
  }

  void launch(const AddingJob& job, cudaStream_t stream) override {
    if (!same(job)) prepare(job);
    adding_rs<Block><<<blocks_, Block::kThreads, Block::kSharedBytes, stream>>>(params_);
    check_launch("adding gemm_rs");
  }

 private:
  bool same(const AddingJob& job) const {
    return blocks_ != 0 && job.x == params_.job.x && job.weight == params_.job.weight &&
           job.out == params_.job.out && job.pieces == params_.job.pieces &&
           job.watch.deadline_ns == params_.job.watch.deadline_ns;
  }

  // All must be resident at once, as they wait for each other.
  static int resident_clusters() {
    check(cudaFuncSetAttribute(adding_rs<Block>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               Block::kSharedBytes),
          "shared memory of adding gemm_rs");
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {Block::kCluster, 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = Block::kCluster;
    config.blockDim = Block::kThreads;
    config.dynamicSmemBytes = Block::kSharedBytes;
    config.attrs = &cluster;
    config.numAttrs = 1;
    int clusters = 0;
    check(cudaOccupancyMaxActiveClusters(&clusters, adding_rs<Block>, &config),
          "resident blocks of adding gemm_rs");
    return clusters;
  }

  void prepare(const AddingJob& job) {
    Params params = params_;
    if (blocks_ == 0 || job.pieces != params.job.pieces) lay_out(job, params);
    params.x = map(job.x, shape_.m, shape_.k, Block::kTileRows);
    params.weight = map(job.weight, shape_.n, shape_.k, Block::kTileColumns / Block::kCluster);
    params.out = map(job.out, params.shard_rows, shape_.n, Block::kGroupRows);
    params.job = job;
    params_ = params;
    blocks_ = unsigned(params.order.clusters * Block::kCluster);
  }

  // What each cluster does, found out here, where divisions cost nothing.
  struct Plan {
    schedule::RsPieceOrder order;
    int works_of_cluster;
    DeviceMemory works;
  };

  Plan plan(int pieces) const {
    schedule::RsPieceOrder order;
    order.rank = shape_.rank;
    order.ranks = shape_.ranks;
    order.row_tiles = int(shape_.m / shape_.ranks / kRows);
    order.column_tiles = int(column_tiles(shape_.n));
    order.pieces = pieces;
    order.band = order.row_tiles;
    while (order.band * kRows > kSwept && order.band % 2 == 0) order.band /= 2;
    order.steps = int((shape_.k + kStepOfK - 1) / kStepOfK);
    order.added = (order.ranks - 1) * Block::kStepsOfPart;
    order.least = Block::kBoxes;
    order.clusters = std::min(most_clusters_, order.tiles());
    // What is lent is in two terms of Element, and the sum of a part of K may be beyond f16.
    if (!kIsHalf) order.split = best_split(order);

    std::vector<std::vector<schedule::PieceWork>> works(size_t(order.clusters));
    size_t most = 0;
    for (int cluster = 0; cluster < order.clusters; ++cluster) {
      auto& of_cluster = works[size_t(cluster)];
      do {
        of_cluster.push_back(work_at(order, cluster, int(of_cluster.size())));
      } while (of_cluster.back().end != 0);
      most = std::max(most, of_cluster.size());
    }
    std::vector<schedule::PieceWork> table;
    for (auto& of_cluster : works) {
      of_cluster.resize(most);
      table.insert(table.end(), of_cluster.begin(), of_cluster.end());
    }
    Plan plan{order, int(most), DeviceMemory(table.size() * sizeof table[0])};
    check(cudaMemcpy(plan.works.data(), table.data(), plan.works.bytes(), cudaMemcpyDefault),
          "works of adding gemm_rs");
    return plan;
  }

  // All that does not depend on the operands.
  void lay_out(const AddingJob& job, Params& params) const {
    const Plan& plan = plans_.at(job.pieces);
    const int64_t shard = shape_.m / shape_.ranks;
    const int64_t columns = int64_t(plan.order.piece_columns()) * Block::kTileColumns;
    params.outbox = map(job.outbox, shape_.m * job.pieces, columns, Block::kGroupRows);
    params.parts = map(job.parts, (shape_.m - shard) * job.pieces, columns, Block::kGroupRows);
    params.lent = map(lent_.data(), lent_rows(), Block::kTileColumns, Block::kGroupRows);
    params.lent_count = reinterpret_cast<uint64_t*>(lent_count_.data());
    params.shard_rows = int(shard);
    params.tiles_of_piece = unsigned(plan.order.piece_tiles()) * Block::kCluster * Block::kGroups;
    params.order = plan.order;
    params.works = reinterpret_cast<const schedule::PieceWork*>(plan.works.data());
    params.works_of_cluster = plan.works_of_cluster;
  }

  int lent_rows() const { return Block::lent_row(lent_places_ * Block::kCluster, 0); }

  static CUtensorMap map(const void* data, int64_t rows, int64_t columns, int box_rows) {
    return map_matrix(data, kIsHalf ? DType::f16 : DType::bf16, rows, columns, box_rows);
  }

  static constexpr int kSwept = 2048;  // rows of a shard, swept together
  AddingShape shape_;
  int most_clusters_;
  std::map<int, Plan> plans_;  // by pieces
  int lent_places_ = 1;        // a map of nothing cannot be made
  DeviceMemory lent_, lent_count_;
  Params params_{};
  unsigned blocks_ = 0;
};

}  // namespace tandem::gpu::fused
