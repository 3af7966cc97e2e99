// The middle of an all-reduce or the end of a reduce-scatter: messages of one block decoded and
// added in f32, in order, with a rank's own values in its place.
#pragma once

#include "codec/cuda/block.cuh"

namespace tandem::gpu {

struct MessageSum {
  const std::byte* messages;  // the first; each `stride` bytes behind the one before
  size_t stride;
  int count;
  int own;             // the one that is `values` instead, or -1
  const void* values;  // as they are
  DType dtype;
};

template <typename Block>
__device__ void sum_messages(const MessageSum& from, const WireJob& wire, int64_t block, int lane,
                             bool on, float (&sum)[kOwn]) {
#pragma unroll
  for (float& value : sum) value = -0.0f;  // to which x adds up to x
  const auto add = [&](int e, float value) { sum[e] = __fadd_rn(sum[e], value); };
  // The next message is on its way while one is decoded.
  const auto after = [&](int r) { return r + 1 == from.own ? r + 2 : r + 1; };
  Block next;
  int r = after(-1);
  if (r < from.count) next.load(wire, from.messages + size_t(r) * from.stride, block, lane);
  for (int rank = 0; rank < from.count; ++rank) {
    if (rank == from.own) {
      for_elements(from.values, from.dtype, wire.parts.elements, block, lane, on, add);
      continue;
    }
    const Block part = next;
    r = after(r);
    if (r < from.count) next.load(wire, from.messages + size_t(r) * from.stride, block, lane);
    part.for_decoded(wire, lane, add);
  }
}

}  // namespace tandem::gpu
