// Phases of an encoded collective's kernel between the exchanges, each on a thread block's own
// slice (encoded_collectives.h). Slots [first, first + size) of a rank's staging hold a message of
// every rank. `receiver(peer)` is the rank whose memory holds the slot to fill for a peer.
#pragma once

#include "codec/cuda/sum.cuh"
#include "collectives/cuda/encoded_kernel.h"

namespace tandem::gpu {

__device__ inline const std::byte* elements_from(const void* values, DType dtype, int64_t begin) {
  return static_cast<const std::byte*>(values) + begin * (dtype == DType::f32 ? 4 : 2);
}
__device__ inline std::byte* elements_from(void* values, DType dtype, int64_t begin) {
  return static_cast<std::byte*>(values) + begin * (dtype == DType::f32 ? 4 : 2);
}
__device__ inline std::byte* slot_of(const EncodedParams& params, int at, int index) {
  return params.exchange.table.memory[at] + size_t(index) * params.exchange.slot_bytes;
}

/// Error feedback of a block: added before it is encoded, and updated with the loss.
struct Feedback {
  float* residual;  // residual of the shard, or null
  int64_t elements;

  __device__ void add(int64_t block, int lane, bool on, float (&x)[kLaneValues]) const {
    if (!residual) return;
    float lost[kLaneValues];
    load_elements(residual, DType::f32, elements, block, lane, on, lost);
#pragma unroll
    for (int e = 0; e < kLaneValues; ++e) x[e] = __fadd_rn(x[e], lost[e]);
  }
  __device__ void keep(int64_t block, int lane, bool on, const float (&x)[kLaneValues],
                       const float (&sent)[kLaneValues]) const {
    if (!residual) return;
    float lost[kLaneValues];
#pragma unroll
    for (int e = 0; e < kLaneValues; ++e) {
      const float error = __fadd_rn(x[e], -sent[e]);
      lost[e] = fabsf(error) <= codec::largest_of(DType::f32) ? error : 0.0f;  // not NaN
    }
    store_elements(residual, DType::f32, elements, block, lane, on, lost);
  }
};

/// Encodes with error feedback; writes the decoded values to `x` if `decodes`.
template <typename Block>
__device__ void encode_with(const Feedback& feedback, const WireParams& wire, int64_t block,
                            int lane, bool on, bool decodes, float (&x)[kLaneValues],
                            Block& encoded) {
  if (!feedback.residual) {
    encoded.encode(wire, x, lane);
    if (decodes) encoded.decode(wire, lane, x);
    return;
  }
  feedback.add(block, lane, on, x);
  float sent[kLaneValues];
#pragma unroll
  for (int e = 0; e < kLaneValues; ++e) sent[e] = x[e];
  encoded.encode(wire, sent, lane);
  encoded.decode(wire, lane, sent);
  feedback.keep(block, lane, on, x, sent);
#pragma unroll
  for (int e = 0; e < kLaneValues; ++e) x[e] = sent[e];
}

/// Peer at distance `step` after this rank, from 1 up.
__device__ inline int peer_after(const EncodedParams& params, int step) {
  const int peer = params.exchange.table.rank + step;
  return peer < params.exchange.table.size ? peer : peer - params.exchange.table.size;
}
__device__ inline Feedback feedback_of(const EncodedParams& params, int owner) {
  return {params.residual ? params.residual + params.begins[owner] : nullptr,
          params.wires[owner].layout.elements};
}
/// Owner's shard of the whole tensor `values`.
template <typename Bytes>
__device__ auto shard_of_params(const EncodedParams& params, Bytes* values, int owner) {
  return elements_from(values, params.dtype, params.begins[owner]);
}

/// Encodes `values` into this rank's slot at every peer; decodes the message into `local_out`,
/// unless null.
template <typename Block, typename Receiver>
__device__ void push_to_all(const EncodedParams& params, const WireParams& wire,
                            const Feedback& feedback, const void* values, void* local_out,
                            int first, const Receiver& receiver) {
  const int64_t elements = wire.layout.elements;
  for_blocks(wire.layout.blocks, [&](int64_t block, int lane, bool on) {
    float x[kLaneValues];
    load_elements(values, params.dtype, elements, block, lane, on, x);
    Block encoded;
    encode_with(feedback, wire, block, lane, on, local_out != nullptr, x, encoded);
    for (int step = local_out ? 1 : 0; step < params.exchange.table.size; ++step) {
      encoded.store(
          wire,
          slot_of(params, receiver(peer_after(params, step)), first + params.exchange.table.rank),
          block, lane, on);
    }
    if (local_out) store_elements(local_out, params.dtype, elements, block, lane, on, x);
  });
}

/// Encodes a block of `owner`'s shard of this rank's tensor into the slot `slot` at `receiver`.
template <typename Block>
__device__ void push_shard_block(const EncodedParams& params, int owner, int receiver, int slot,
                                 int64_t block, int lane, bool on) {
  const WireParams& wire = params.wires[owner];
  float x[kLaneValues];
  load_elements(shard_of_params(params, params.exchange.in, owner), params.dtype,
                wire.layout.elements, block, lane, on, x);
  Block encoded;
  encode_with(feedback_of(params, owner), wire, block, lane, on, false, x, encoded);
  encoded.store(wire, slot_of(params, receiver, slot), block, lane, on);
}

/// Encodes every other rank's shard of this rank's tensor and sends it to its owner.
template <typename Block, typename Receiver>
__device__ void push_shards(const EncodedParams& params, int first, const Receiver& receiver) {
  for (int step = 1; step < params.exchange.table.size; ++step) {
    const int owner = peer_after(params, step);
    for_blocks(params.wires[owner].layout.blocks, [&](int64_t block, int lane, bool on) {
      push_shard_block<Block>(params, owner, receiver(owner), first + params.exchange.table.rank,
                              block, lane, on);
    });
  }
}

/// Messages received for this rank's shard, with its local values uncompressed.
__device__ inline MessageSum sum_of_shard(const EncodedParams& params, int first) {
  const int rank = params.exchange.table.rank;
  return {slot_of(params, rank, first),
          params.exchange.slot_bytes,
          params.exchange.table.size,
          rank,
          shard_of_params(params, params.exchange.in, rank),
          params.dtype};
}

/// Writes the sum of `all`, messages of `wire`, to `out`.
template <typename Block>
__device__ void add_messages(const MessageSum& all, const WireParams& wire, void* out) {
  for_blocks(wire.layout.blocks, [&](int64_t block, int lane, bool on) {
    float sum[kLaneValues];
    sum_messages<Block>(all, wire, block, lane, on, sum);
    store_elements(out, all.dtype, wire.layout.elements, block, lane, on, sum);
  });
}

/// Encodes a block of the sum of this rank's shard and sends it to all; stores the decoded values.
template <typename Block>
__device__ void push_sum_block(const EncodedParams& params, const MessageSum& all, int second,
                               int64_t block, int lane, bool on) {
  const int rank = params.exchange.table.rank;
  const WireParams& wire = params.wires[rank];
  float sum[kLaneValues];
  sum_messages<Block>(all, wire, block, lane, on, sum);
  fill_up(wire.layout.elements, block, lane, sum);
  Block encoded;
  encode_with(feedback_of(params, rank), wire, block, lane, on, true, sum, encoded);
  for (int step = 1; step < params.exchange.table.size; ++step) {
    encoded.store(wire, slot_of(params, peer_after(params, step), second + rank), block, lane, on);
  }
  store_elements(shard_of_params(params, params.exchange.out, rank), params.dtype,
                 wire.layout.elements, block, lane, on, sum);
}
template <typename Block>
__device__ void push_sum(const EncodedParams& params, int first, int second) {
  const MessageSum all = sum_of_shard(params, first);
  for_blocks(params.wires[params.exchange.table.rank].layout.blocks,
             [&](int64_t block, int lane, bool on) {
               push_sum_block<Block>(params, all, second, block, lane, on);
             });
}

/// Decodes a block of `owner`'s shard from slot `slot`.
template <typename Block>
__device__ void take_block(const EncodedParams& params, int owner, int slot, int64_t block,
                           int lane, bool on) {
  const WireParams& wire = params.wires[owner];
  Block encoded;
  encoded.load(wire, slot_of(params, params.exchange.table.rank, slot), block, lane);
  float x[kLaneValues];
  encoded.decode(wire, lane, x);
  store_elements(shard_of_params(params, params.exchange.out, owner), params.dtype,
                 wire.layout.elements, block, lane, on, x);
}

/// Decodes the other ranks' shards.
template <typename Block>
__device__ void take_shards(const EncodedParams& params, int first) {
  for (int step = 1; step < params.exchange.table.size; ++step) {
    const int owner = peer_after(params, step);
    for_blocks(params.wires[owner].layout.blocks, [&](int64_t block, int lane, bool on) {
      take_block<Block>(params, owner, first + owner, block, lane, on);
    });
  }
}

}  // namespace tandem::gpu
