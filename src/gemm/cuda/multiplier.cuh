// Multiplying warpgroup of gemm_block.cuh: takes stages from the ring, and holds the accumulators
// of its 64 rows of a tile.
#pragma once

#include "gemm/cuda/staged_tile.cuh"

namespace tandem::gpu::fused {

/// `kCopied`: stages are filled by cp.async, too.
template <class Tiles, bool kCopied>
class Multiplier {
  using Shared = typename Tiles::Shared;
  using Operand = typename Tiles::Operand;
  static constexpr bool kFp8 = Tiles::Product::kFp8;

 public:
  using Sums = float[Tiles::kSums];
  using ShortSums = float[kFp8 ? Tiles::kSums : 1];

  /// `sums`: accumulators of a tile. `short_sums`: those of e4m3 until they are promoted.
  __device__ Multiplier(Shared& shared, const GroupThread& at, Sums& sums, ShortSums& short_sums)
      : shared_(shared),
        at_(at),
        sums_(sums),
        short_sums_(short_sums),
        x_(operand_descriptor<Tiles::kOptions.x_transposed>(
            address_of(shared.x[0]) + at.group * (Tiles::kXBytes / Tiles::kGroups))),
        weight_(
            operand_descriptor<Tiles::kOptions.weight_transposed>(address_of(shared.weight[0]))) {}

  __device__ void begin() {
    unreleased_ = -1;
    unpromoted_ = 0;
    if constexpr (kFp8) {
#pragma unroll
      for (float& sum : sums_) sum = 0;
    }
  }
  /// Waits until the next stage is full.
  __device__ void await() {
    shared_.full[stage_.index].wait(stage_.phase);
    // Data copied by cp.async, each copy with its own arrival, is read by the tensor cores.
    if constexpr (kCopied) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  /// Starts a k-block's multiplication; `first`: the first one of the tile.
  __device__ void issue(bool first) {
    fence_sums(products());
    cute::warpgroup_arrive();
    multiply_step<Operand, Tiles::kOptions.x_transposed, Tiles::kOptions.weight_transposed>(
        products(), x_ + stage_.index * (Tiles::kXBytes >> 4),
        weight_ + stage_.index * (Tiles::kWeightBytes >> 4), kFp8 ? unpromoted_ == 0 : first);
    cute::warpgroup_commit_batch();
  }
  /// Waits for the previous multiplication, and releases its stage.
  __device__ void retire_previous() {
    cute::warpgroup_wait<1>();
    fence_sums(products());
    if (unreleased_ >= 0) release(unreleased_);
    unreleased_ = stage_.index;
    stage_.advance();
    if constexpr (kFp8) {
      if (++unpromoted_ == kPromotionSteps) promote();
    }
  }
  __device__ void retire_all() {
    cute::warpgroup_wait<0>();
    fence_sums(products());
    if (unreleased_ >= 0) release(unreleased_);
    unreleased_ = -1;
  }
  /// e4m3: adds the tensor cores' accumulators to the sums.
  __device__ void promote() {
    if (unpromoted_ == 0) return;
    retire_all();
    unpromoted_ = 0;
#pragma unroll
    for (int i = 0; i < Tiles::kSums; ++i) sums_[i] += short_sums_[i];
  }
  /// Consumes a stage of 64 added rows, which belong to one warpgroup: its `add` adds them to the
  /// sums. The other only releases the stage.
  template <class Add>
  __device__ void add_rows(bool local, Add&& add) {
    if (local) {
      retire_all();
      shared_.full[stage_.index].wait(stage_.phase);
      add(sums_, shared_.weight[stage_.index]);
    } else {
      shared_.full[stage_.index].wait(stage_.phase);
    }
    // Rows were read by ordinary loads; this orders TMA's refill of the stage after them.
    if (local) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    // All threads have read, and none still waits for the phase of a stage that may be refilled.
    cutlass::arch::NamedBarrier::sync(128, at_.group + 1);
    release(stage_.index);
    stage_.advance();
  }

 private:
  __device__ auto& products() {
    if constexpr (kFp8) {
      return short_sums_;
    } else {
      return sums_;
    }
  }
  /// Called by all; acts in thread 0, after its own wgmma.wait_group. That the other three warps
  /// have passed await(), too, is assumed, not known: wgmma keeps the four warps of a warpgroup
  /// together, so none can lag by a whole stage. CUTLASS's release of multicast stages assumes the
  /// same. Arrives locally first: the remote arrive may let the peer refill.
  __device__ void release(int index) {
    if (at_.thread != 0) return;
    [[maybe_unused]] const uint32_t cluster_rank = cute::block_rank_in_cluster();
    shared_.empty[index].arrive();
    if constexpr (Tiles::kCluster == 2) shared_.empty[index].arrive(cluster_rank ^ 1);
  }

  Shared& shared_;
  const GroupThread at_;
  Sums& sums_;
  ShortSums& short_sums_;
  uint64_t x_, weight_;
  PipelineState<Tiles::kStages> stage_;
  int unreleased_ = -1;  // stage that is read by wgmmas which may not have finished
  int unpromoted_ = 0;   // k-blocks that are only in the short accumulators
};

}  // namespace tandem::gpu::fused
