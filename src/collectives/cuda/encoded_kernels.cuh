// The kernels of encoded_all_reduce.h. A source file for each family of formats has its own, since
// they take long to compile.
#pragma once

#include "codec/cuda/block.cuh"
#include "collectives/cuda/encoded_kernel.h"
#include "collectives/cuda/exchange.cuh"

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

/// What error feedback adds to a block before it is encoded, and what it keeps of the loss.
struct Feedback {
  float* residual;  // of the shard, or nullptr
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

/// Leaves what the receivers decode in `sent`.
template <typename Format>
__device__ void encode_with(const Feedback& feedback, const WireJob& wire, int64_t block, int lane,
                            bool on, float (&x)[kOwn], EncodedBlock<Format>& encoded,
                            float (&sent)[kOwn]) {
  feedback.add(block, lane, on, x);
#pragma unroll
  for (int e = 0; e < kOwn; ++e) sent[e] = x[e];
  encoded.encode(wire, sent, lane);
  encoded.decode(wire, lane, sent);
  feedback.keep(block, lane, on, x, sent);
}

template <typename Format>
__global__ void __launch_bounds__(kEncodedThreads)
    one_shot_kernel(const __grid_constant__ EncodedJob job) {
  const PeerTable& table = job.exchange.table;
  const EnteredCall call = enter_call(job.exchange);
  const int first = int(call.epoch % 2) * 2 * table.size;
  const WireJob& wire = job.wires[0];
  const int64_t elements = wire.parts.elements;
  const Feedback feedback{job.residual, elements};
  for_blocks(wire.parts.blocks, [&](int64_t block, int lane, bool on) {
    float x[kOwn], sent[kOwn];
    load_elements(job.exchange.in, job.dtype, elements, block, lane, on, x);
    EncodedBlock<Format> encoded;
    encode_with(feedback, wire, block, lane, on, x, encoded, sent);
    for (int step = 0; step < table.size; ++step) {
      const int peer = peer_at(table, step);
      encoded.store(wire, slot_of(job, call.receiver(job.exchange, peer), first + table.rank),
                    block, lane, on);
    }
  });
  if (!exchange_flags(job.exchange, 0, call, [&](int) { return wire.parts.bytes; })) return;
  for_blocks(wire.parts.blocks, [&](int64_t block, int lane, bool on) {
    float sum[kOwn] = {};
    for (int r = 0; r < table.size; ++r) {
      EncodedBlock<Format> encoded;
      encoded.load(wire, slot_of(job, table.rank, first + r), block, lane);
      float x[kOwn];
      encoded.decode(wire, lane, x);
#pragma unroll
      for (int e = 0; e < kOwn; ++e) sum[e] = r == 0 ? x[e] : __fadd_rn(sum[e], x[e]);
    }
    store_elements(job.exchange.out, job.dtype, elements, block, lane, on, sum);
  });
}

template <typename Format>
__global__ void __launch_bounds__(kEncodedThreads)
    two_shot_kernel(const __grid_constant__ EncodedJob job) {
  const PeerTable& table = job.exchange.table;
  const EnteredCall call = enter_call(job.exchange);
  const int rank = table.rank;
  const int first = int(call.epoch % 2) * 2 * table.size, second = first + table.size;
  const auto bytes_of = [&](int owner) { return job.wires[owner].parts.bytes; };
  const auto residual_of = [&](int owner) {
    return Feedback{job.residual ? job.residual + job.begins[owner] : nullptr,
                    job.wires[owner].parts.elements};
  };
  for (int step = 1; step < table.size; ++step) {
    const int owner = peer_at(table, step);
    const WireJob& wire = job.wires[owner];
    const std::byte* in = elements_from(job.exchange.in, job.dtype, job.begins[owner]);
    const Feedback feedback = residual_of(owner);
    std::byte* const to = slot_of(job, call.receiver(job.exchange, owner), first + rank);
    for_blocks(wire.parts.blocks, [&](int64_t block, int lane, bool on) {
      float x[kOwn], sent[kOwn];
      load_elements(in, job.dtype, wire.parts.elements, block, lane, on, x);
      EncodedBlock<Format> encoded;
      encode_with(feedback, wire, block, lane, on, x, encoded, sent);
      encoded.store(wire, to, block, lane, on);
    });
  }
  if (!exchange_flags(job.exchange, 0, call, bytes_of)) return;
  const WireJob& mine = job.wires[rank];
  const int64_t elements = mine.parts.elements;
  for_blocks(mine.parts.blocks, [&](int64_t block, int lane, bool on) {
    float sum[kOwn] = {}, x[kOwn];
    for (int r = 0; r < table.size; ++r) {
      if (r == rank) {
        load_elements(elements_from(job.exchange.in, job.dtype, job.begins[rank]), job.dtype,
                      elements, block, lane, on, x);
      } else {
        EncodedBlock<Format> part;
        part.load(mine, slot_of(job, rank, first + r), block, lane);
        part.decode(mine, lane, x);
      }
#pragma unroll
      for (int e = 0; e < kOwn; ++e) sum[e] = r == 0 ? x[e] : __fadd_rn(sum[e], x[e]);
    }
    EncodedBlock<Format> encoded;
    fill_up(elements, block, lane, sum);
    encode_with(residual_of(rank), mine, block, lane, on, sum, encoded, x);
    for (int step = 1; step < table.size; ++step) {
      encoded.store(mine, slot_of(job, peer_at(table, step), second + rank), block, lane, on);
    }
    store_elements(elements_from(job.exchange.out, job.dtype, job.begins[rank]), job.dtype,
                   elements, block, lane, on, x);
  });
  if (!exchange_flags(job.exchange, 1, call, [&](int) { return bytes_of(rank); })) return;
  for (int step = 1; step < table.size; ++step) {
    const int owner = peer_at(table, step);
    const WireJob& wire = job.wires[owner];
    std::byte* const out = elements_from(job.exchange.out, job.dtype, job.begins[owner]);
    for_blocks(wire.parts.blocks, [&](int64_t block, int lane, bool on) {
      EncodedBlock<Format> encoded;
      encoded.load(wire, slot_of(job, rank, second + owner), block, lane);
      float x[kOwn];
      encoded.decode(wire, lane, x);
      store_elements(out, job.dtype, wire.parts.elements, block, lane, on, x);
    });
  }
}

template <typename Format>
EncodedKernel encoded_kernel(bool one_shot) {
  return one_shot ? one_shot_kernel<Format> : two_shot_kernel<Format>;
}

}  // namespace tandem::gpu
