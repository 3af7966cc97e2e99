// The kernel of adding.h.
#pragma once

#include <algorithm>
#include <type_traits>

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

 public:
  Adding()
      : blocks_of_gpu_(multiprocessors() / Block::kCluster * Block::kCluster),
        lent_(size_t(Block::lent_row(blocks_of_gpu_, 0)) * Block::kTileColumns * sizeof(Element)),
        lent_count_(size_t(blocks_of_gpu_) * sizeof(uint64_t)) {
    check(cudaFuncSetAttribute(adding_rs<Block>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               Block::kSharedBytes),
          "shared memory of adding gemm_rs");
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

  static int multiprocessors() {
    int device = 0, count = 0;
    check(cudaGetDevice(&device), "current device");
    check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device),
          "multiprocessors");
    return count;
  }

  void prepare(const AddingJob& job) {
    if (blocks_ == 0 || job.pieces != params_.job.pieces) lay_out(job);
    params_.x = map(job.x, job.m, job.k, Block::kTileRows);
    params_.weight = map(job.weight, job.n, job.k, Block::kTileColumns / Block::kCluster);
    params_.out = map(job.out, params_.shard_rows, job.n, Block::kGroupRows);
    params_.job = job;
  }

  // All that does not depend on the operands.
  void lay_out(const AddingJob& job) {
    schedule::RsPieceOrder order;
    order.rank = job.staging.rank;
    order.ranks = job.staging.size;
    const int64_t shard = job.m / order.ranks;
    order.row_tiles = int(shard / kRows);
    order.column_tiles = int(column_tiles(job.n));
    order.pieces = job.pieces;
    order.band = order.row_tiles;
    while (order.band * kRows > kSwept && order.band % 2 == 0) order.band /= 2;
    order.steps = int((job.k + kStepOfK - 1) / kStepOfK);
    order.added = (order.ranks - 1) * Block::kStepsOfPart;
    order.least = Block::kBoxes;
    order.clusters = std::min(blocks_of_gpu_ / Block::kCluster, order.tiles());
    order.split = best_split(order);

    const int64_t columns = int64_t(order.piece_columns()) * Block::kTileColumns;
    params_.outbox = map(job.outbox, job.m * job.pieces, columns, Block::kGroupRows);
    params_.parts =
        map(job.parts, std::max(job.m - shard, shard) * job.pieces, columns, Block::kGroupRows);
    params_.lent = map(lent_.data(), Block::lent_row(blocks_of_gpu_, 0), Block::kTileColumns,
                       Block::kGroupRows);
    params_.lent_count = reinterpret_cast<uint64_t*>(lent_count_.data());
    params_.shard_rows = int(shard);
    params_.tiles_of_piece = unsigned(order.piece_tiles()) * Block::kCluster * Block::kGroups;
    params_.order = order;
    blocks_ = unsigned(order.clusters * Block::kCluster);
  }

  static CUtensorMap map(const void* data, int64_t rows, int64_t columns, int box_rows) {
    constexpr DType kDtype = std::is_same_v<Element, __half> ? DType::f16 : DType::bf16;
    return map_matrix(data, kDtype, rows, columns, box_rows);
  }

  static constexpr int kSwept = 2048;  // rows of a shard, swept together
  int blocks_of_gpu_;
  DeviceMemory lent_, lent_count_;
  typename Block::Params params_{};
  unsigned blocks_ = 0;
};

}  // namespace tandem::gpu::fused
