// Loading thread's side of a block's ring of stages (gemm_block.cuh): waits until a stage is free,
// and fills it by TMA. A source calls one of these for each stage.
#pragma once

#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "gemm/cuda/gemm_tiles.cuh"
#include "gemm/cuda/tensor_map.h"

namespace tandem::gpu::fused {

template <class Tiles>
class StageFiller {
  using Shared = typename Tiles::Shared;

 public:
  static constexpr auto kNormal = uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL);

  __device__ explicit StageFiller(Shared& shared)
      : shared_(shared), half_(int(cute::block_rank_in_cluster())) {}

  /// Waits until the next stage is free. Returns the barrier, which expects `bytes`, including
  /// those that other blocks of the cluster load for this one.
  __device__ uint64_t* begin(uint32_t bytes) {
    shared_.empty[state_.index].wait(state_.phase ^ 1);
    shared_.full[state_.index].arrive_and_expect_tx(bytes);
    return reinterpret_cast<uint64_t*>(&shared_.full[state_.index]);
  }
  __device__ void end() { state_.advance(); }
  /// Operand buffers of the current stage.
  __device__ std::byte* x() const { return shared_.x[state_.index]; }
  __device__ std::byte* weight() const { return shared_.weight[state_.index]; }
  /// Rank of this block in its cluster.
  __device__ int half() const { return half_; }

  /// Loads a k-block: a tile's rows of x, and this block's half of the cluster's columns.
  __device__ void load_step(const CUtensorMap& x_map, const CUtensorMap& weight_map, int step,
                            int row, int column) {
    static_assert(Tiles::kCluster == 2);
    uint64_t* const full = begin(Tiles::kXBytes + Tiles::kWeightBytes);
    const int at = step * Tiles::kStepOfK;
    cute::SM90_TMA_LOAD_2D::copy(&x_map, full, kNormal, x(), at, row);
    if constexpr (Tiles::kOptions.weight_transposed) {
      constexpr int kColumns = kStepBytes / int(sizeof(typename Tiles::Operand));
      constexpr int kBoxes = int(Tiles::kWeightBytes / kTransposedBox) / 2;
#pragma unroll
      for (int i = 0; i < kBoxes; ++i) {
        const int box = half_ * kBoxes + i;
        cute::SM90_TMA_LOAD_MULTICAST_2D::copy(&weight_map, full, uint16_t(3), kNormal,
                                               weight() + box * kTransposedBox,
                                               column + box * kColumns, at);
      }
    } else {
      cute::SM90_TMA_LOAD_MULTICAST_2D::copy(&weight_map, full, uint16_t(3), kNormal,
                                             weight() + half_ * (Tiles::kWeightBytes / 2), at,
                                             column + half_ * (Tiles::kTileColumns / 2));
    }
    end();
  }
  /// Loads 64 rows of a tile's columns, to be added to the accumulators.
  __device__ void load_rows(const CUtensorMap& from, int column, int row) {
    uint64_t* const full = begin(Tiles::kBoxes * Tiles::kBoxBytes);
    for (int box = 0; box < Tiles::kBoxes; ++box) {
      cute::SM90_TMA_LOAD_2D::copy(&from, full, kNormal, weight() + box * Tiles::kBoxBytes,
                                   column + box * Tiles::kBoxColumns, row);
    }
    end();
  }
  /// Slice in a wire format.
  __device__ void load_slice(const std::byte* from, uint32_t bytes) {
    uint64_t* const full = begin(bytes);
    cute::SM90_BULK_COPY_G2S::copy(from, full, weight(), int32_t(bytes));
    end();
  }

 private:
  Shared& shared_;
  int half_;
  PipelineState<Tiles::kStages> state_;
};

/// Alternates the K direction between work items (serpentine) for L2 reuse: data read last by the
/// previous one is still cached.
class Serpentine {
 public:
  /// K-block of a work item that is loaded in position `number`.
  template <class Work>
  __device__ int step_of(const Work& work, int number) const {
    return reversed_ ? work.end - 1 - number : work.begin + number;
  }
  /// Called after each work item.
  __device__ void reverse() { reversed_ = !reversed_; }

 private:
  bool reversed_ = false;
};

}  // namespace tandem::gpu::fused
