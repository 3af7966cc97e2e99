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
__device__ inline std::byte* slot_of(const EncodedJob& job, int at, int index) {
  return job.exchange.table.memory[at] + size_t(index) * job.exchange.slot_bytes;
}

/// Error feedback of a block: added before it is encoded, and updated with the loss.
struct Feedback {
  float* residual;  // residual of the shard, or null
  int64_t elements;

  __device__ void add(int64_t block, int lane, bool on, float (&x)[kOwn]) const {
    if (!residual) return;
    float lost[kOwn];
    load_elements(residual, DType::f32, elements, block, lane, on, lost);
#pragma unroll
    for (int e = 0; e < kOwn; ++e) x[e] = __fadd_rn(x[e], lost[e]);
  }
  __device__ void keep(int64_t block, int lane, bool on, const float (&x)[kOwn],
                       const float (&sent)[kOwn]) const {
    if (!residual) return;
    float lost[kOwn];
#pragma unroll
    for (int e = 0; e < kOwn; ++e) {
      const float error = __fadd_rn(x[e], -sent[e]);
      lost[e] = fabsf(error) <= codec::largest_of(DType::f32) ? error : 0.0f;  // not NaN
    }
    store_elements(residual, DType::f32, elements, block, lane, on, lost);
  }
};

/// Encodes with error feedback; writes the decoded values to `x` if `decodes`.
template <typename Block>
__device__ void encode_with(const Feedback& feedback, const WireJob& wire, int64_t block, int lane,
                            bool on, bool decodes, float (&x)[kOwn], Block& encoded) {
  if (!feedback.residual) {
    encoded.encode(wire, x, lane);
    if (decodes) encoded.decode(wire, lane, x);
    return;
  }
  feedback.add(block, lane, on, x);
  float sent[kOwn];
#pragma unroll
  for (int e = 0; e < kOwn; ++e) sent[e] = x[e];
  encoded.encode(wire, sent, lane);
  encoded.decode(wire, lane, sent);
  feedback.keep(block, lane, on, x, sent);
#pragma unroll
  for (int e = 0; e < kOwn; ++e) x[e] = sent[e];
}

/// Peer at distance `step` after this rank, from 1 up.
__device__ inline int peer_after(const EncodedJob& job, int step) {
  const int peer = job.exchange.table.rank + step;
  return peer < job.exchange.table.size ? peer : peer - job.exchange.table.size;
}
__device__ inline Feedback feedback_of(const EncodedJob& job, int owner) {
  return {job.residual ? job.residual + job.begins[owner] : nullptr,
          job.wires[owner].parts.elements};
}
/// Owner's shard of the whole tensor `values`.
template <typename Bytes>
__device__ auto shard_of_job(const EncodedJob& job, Bytes* values, int owner) {
  return elements_from(values, job.dtype, job.begins[owner]);
}

/// Encodes `values` into this rank's slot at every peer; decodes the message into `kept`, unless
/// null.
template <typename Block, typename Receiver>
__device__ void push_to_all(const EncodedJob& job, const WireJob& wire, const Feedback& feedback,
                            const void* values, void* kept, int first, const Receiver& receiver) {
  const int64_t elements = wire.parts.elements;
  for_blocks(wire.parts.blocks, [&](int64_t block, int lane, bool on) {
    float x[kOwn];
    load_elements(values, job.dtype, elements, block, lane, on, x);
    Block encoded;
    encode_with(feedback, wire, block, lane, on, kept != nullptr, x, encoded);
    for (int step = kept ? 1 : 0; step < job.exchange.table.size; ++step) {
      encoded.store(wire,
                    slot_of(job, receiver(peer_after(job, step)), first + job.exchange.table.rank),
                    block, lane, on);
    }
    if (kept) store_elements(kept, job.dtype, elements, block, lane, on, x);
  });
}

/// Encodes a block of `owner`'s shard of this rank's tensor into the slot `slot` at `receiver`.
template <typename Block>
__device__ void push_shard_block(const EncodedJob& job, int owner, int receiver, int slot,
                                 int64_t block, int lane, bool on) {
  const WireJob& wire = job.wires[owner];
  float x[kOwn];
  load_elements(shard_of_job(job, job.exchange.in, owner), job.dtype, wire.parts.elements, block,
                lane, on, x);
  Block encoded;
  encode_with(feedback_of(job, owner), wire, block, lane, on, false, x, encoded);
  encoded.store(wire, slot_of(job, receiver, slot), block, lane, on);
}

/// Encodes every other rank's shard of this rank's tensor and sends it to its owner.
template <typename Block, typename Receiver>
__device__ void push_shards(const EncodedJob& job, int first, const Receiver& receiver) {
  for (int step = 1; step < job.exchange.table.size; ++step) {
    const int owner = peer_after(job, step);
    for_blocks(job.wires[owner].parts.blocks, [&](int64_t block, int lane, bool on) {
      push_shard_block<Block>(job, owner, receiver(owner), first + job.exchange.table.rank, block,
                              lane, on);
    });
  }
}

/// Messages received for this rank's shard, with its local values uncompressed.
__device__ inline MessageSum sum_of_shard(const EncodedJob& job, int first) {
  const int rank = job.exchange.table.rank;
  return {slot_of(job, rank, first),
          job.exchange.slot_bytes,
          job.exchange.table.size,
          rank,
          shard_of_job(job, job.exchange.in, rank),
          job.dtype};
}

/// Writes the sum of `all`, messages of `wire`, to `out`.
template <typename Block>
__device__ void add_messages(const MessageSum& all, const WireJob& wire, void* out) {
  for_blocks(wire.parts.blocks, [&](int64_t block, int lane, bool on) {
    float sum[kOwn];
    sum_messages<Block>(all, wire, block, lane, on, sum);
    store_elements(out, all.dtype, wire.parts.elements, block, lane, on, sum);
  });
}

/// Encodes a block of the sum of this rank's shard and sends it to all; stores the decoded values.
template <typename Block>
__device__ void push_sum_block(const EncodedJob& job, const MessageSum& all, int second,
                               int64_t block, int lane, bool on) {
  const int rank = job.exchange.table.rank;
  const WireJob& wire = job.wires[rank];
  float sum[kOwn];
  sum_messages<Block>(all, wire, block, lane, on, sum);
  fill_up(wire.parts.elements, block, lane, sum);
  Block encoded;
  encode_with(feedback_of(job, rank), wire, block, lane, on, true, sum, encoded);
  for (int step = 1; step < job.exchange.table.size; ++step) {
    encoded.store(wire, slot_of(job, peer_after(job, step), second + rank), block, lane, on);
  }
  store_elements(shard_of_job(job, job.exchange.out, rank), job.dtype, wire.parts.elements, block,
                 lane, on, sum);
}
template <typename Block>
__device__ void push_sum(const EncodedJob& job, int first, int second) {
  const MessageSum all = sum_of_shard(job, first);
  for_blocks(job.wires[job.exchange.table.rank].parts.blocks,
             [&](int64_t block, int lane, bool on) {
               push_sum_block<Block>(job, all, second, block, lane, on);
             });
}

/// Decodes a block of `owner`'s shard from slot `slot`.
template <typename Block>
__device__ void take_block(const EncodedJob& job, int owner, int slot, int64_t block, int lane,
                           bool on) {
  const WireJob& wire = job.wires[owner];
  Block encoded;
  encoded.load(wire, slot_of(job, job.exchange.table.rank, slot), block, lane);
  float x[kOwn];
  encoded.decode(wire, lane, x);
  store_elements(shard_of_job(job, job.exchange.out, owner), job.dtype, wire.parts.elements, block,
                 lane, on, x);
}

/// Decodes the other ranks' shards.
template <typename Block>
__device__ void take_shards(const EncodedJob& job, int first) {
  for (int step = 1; step < job.exchange.table.size; ++step) {
    const int owner = peer_after(job, step);
    for_blocks(job.wires[owner].parts.blocks, [&](int64_t block, int lane, bool on) {
      take_block<Block>(job, owner, first + owner, block, lane, on);
    });
  }
}

}  // namespace tandem::gpu
