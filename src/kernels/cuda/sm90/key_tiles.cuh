// Products of a multiplying warpgroup's queries with tiles of keys and values, as they arrive.
#pragma once

#include "kernels/cuda/sm90/attention.cuh"

namespace tandem::gpu::sm90 {

/// 64 rows of queries; a tile of keys has kTile rows, and `Memory` its boxes and barriers by stage:
/// q, k, v, k_full, v_full, k_empty, v_empty. A box of q has kQueryRows rows.
template <int kHead, int kTile, int kStages, int kQueryRows, class Memory>
class KeyTiles {
 protected:
  static constexpr int kQueryBox = kQueryRows * kRowBytes, kKeyBox = kTile * kRowBytes;

  __device__ __forceinline__ KeyTiles(Memory& shared, int group)
      : shared_(shared), group_(group), thread_(int(threadIdx.x) % 128), lane_(thread_ % 32) {}

  __device__ __forceinline__ void issue_scores(Sums<kTile>& scores) {
    shared_.k_full[keys_.index].wait(keys_.phase);
    fence(scores);
    cute::warpgroup_arrive();
    multiply_heads<kHead, kTile>(scores, address_of(shared_.q[0]) + group_ * kBoxBytes, kQueryBox,
                                 address_of(shared_.k[keys_.index][0]), kKeyBox);
    cute::warpgroup_commit_batch();
  }
  /// Waits for the scores, while kPending later products may be unfinished.
  template <int kPending>
  __device__ __forceinline__ void end_scores(Sums<kTile>& scores) {
    cute::warpgroup_wait<kPending>();
    fence(scores);
    release(shared_.k_empty[keys_.index]);
    keys_.advance();
  }
  /// Issues out += weights v, or = for the first tile.
  __device__ __forceinline__ void add_values(Sums<kHead>& out, uint32_t (&weights)[kTile / 4]) {
    using Instruction = typename Product<kHead, kRowsOfK, kColumnsOfK>::Registers;
    shared_.v_full[values_.index].wait(values_.phase);
    fence(out);
    fence(weights);
    cute::warpgroup_arrive();
#pragma unroll
    for (int k = 0; k < kTile / 16; ++k) {
      multiply<Instruction>(
          out, weights + 4 * k,
          columns_descriptor<kKeyBox>(address_of(shared_.v[values_.index][0])) + k * k_stride(true),
          is_first_ && k == 0, std::make_index_sequence<kHead / 2>{});
    }
    cute::warpgroup_commit_batch();
    is_first_ = false;
  }
  __device__ __forceinline__ void end_values(Sums<kHead>& out, uint32_t (&weights)[kTile / 4]) {
    cute::warpgroup_wait<0>();
    fence(out);
    fence(weights);
    release(shared_.v_empty[values_.index]);
    values_.advance();
  }
  __device__ __forceinline__ static void scale(Sums<kHead>& out, float first, float second) {
    for_each<kHead / 2>([&](auto i) { out[i] *= i / 2 % 2 == 0 ? first : second; });
  }

  Memory& shared_;
  const int group_, thread_, lane_;
  PipelineState<kStages> keys_, values_;
  bool is_first_;  // no values have been added

 private:
  __device__ __forceinline__ void release(EmptyBarrier& empty) const {
    if (thread_ == 0) empty.arrive();
  }
};

}  // namespace tandem::gpu::sm90
