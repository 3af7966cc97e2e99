// Reduction step of an all-reduce or reduce-scatter: messages of one block are decoded and added in
// f32, in order, with this rank's values used uncompressed.
#pragma once

#include "codec/cuda/block.cuh"

namespace tandem::gpu {

struct MessageSum {
  const std::byte* messages;  // first message; the others follow at distances of `stride` bytes
  size_t stride;
  int count;
  int local;           // index of the message replaced by `values`, or -1
  const void* values;  // uncompressed
  DType dtype;
};

/// Messages in flight: as many as fit the registers.
template <typename Block>
constexpr int kFetchedAtOnce = Block::transform == Transform::none ? 3 : 1;

template <typename Block>
__device__ void sum_messages(const MessageSum& from, const WireParams& wire, int64_t block,
                             int lane, bool on, float (&sum)[kLaneValues]) {
#pragma unroll
  for (float& value : sum) value = -0.0f;  // neutral element: -0 + x is x
  const auto add = [&](int e, float value) { sum[e] = __fadd_rn(sum[e], value); };
  constexpr int kLast = kFetchedAtOnce<Block> - 1;
  typename Block::Fetched next[kLast + 1];
  int fetched = -1;
  const auto fetch = [&](int slot) {
    ++fetched;
    if (fetched == from.local) ++fetched;
    if (fetched >= from.count) return;
    next[slot] = Block::fetch(wire, from.messages + size_t(fetched) * from.stride, block, lane);
  };
#pragma unroll
  for (int slot = 0; slot <= kLast; ++slot) fetch(slot);
  FetchedHalves local;
  if (from.local >= 0) local.fetch(from.values, from.dtype, wire.layout.elements, block, lane, on);
  for (int rank = 0; rank < from.count; ++rank) {
    if (rank == from.local) {
      if (local.are_there) {
        local.widen(from.dtype, add);
      } else {
        for_elements(from.values, from.dtype, wire.layout.elements, block, lane, on, add);
      }
      continue;
    }
    Block shard;
    shard.open(wire, next[0], lane);
#pragma unroll
    for (int slot = 0; slot < kLast; ++slot) next[slot] = next[slot + 1];
    fetch(kLast);
    shard.for_decoded(wire, lane, add);
  }
}

}  // namespace tandem::gpu
