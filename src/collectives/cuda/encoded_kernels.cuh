// The kernels of encoded_collectives.h. A source file for each family of formats has its own, since
// they take long to compile.
#pragma once

#include "collectives/cuda/encoded_phases.cuh"
#include "collectives/cuda/exchange.cuh"

namespace tandem::gpu {

/// Staging alternates from call to call.
__device__ inline int first_slot(const EncodedJob& job, const EnteredCall& call) {
  return int(call.epoch % 2) * 2 * job.exchange.table.size;
}
__device__ inline auto receiver_of(const EncodedJob& job, const EnteredCall& call) {
  return [&](int peer) { return call.receiver(job.exchange, peer); };
}

/// Of the messages of all shards, and of the own one's.
__device__ inline auto bytes_of(const EncodedJob& job) {
  return [&](int owner) { return job.wires[owner].parts.bytes; };
}
__device__ inline auto bytes_of_own(const EncodedJob& job) {
  return [&](int) { return job.wires[job.exchange.table.rank].parts.bytes; };
}

template <typename Block>
__global__ void __launch_bounds__(kEncodedThreads)
    one_shot_kernel(const __grid_constant__ EncodedJob job) {
  const EnteredCall call = enter_call(job.exchange);
  const int first = first_slot(job, call);
  const WireJob& wire = job.wires[0];
  push_to_all<Block>(job, wire, {job.residual, wire.parts.elements}, job.exchange.in, nullptr,
                     first, receiver_of(job, call));
  if (!exchange_flags(job.exchange, 0, call, [&](int) { return wire.parts.bytes; })) return;
  const PeerTable& table = job.exchange.table;
  add_messages<Block>({slot_of(job, table.rank, first), job.exchange.slot_bytes, table.size, -1,
                       nullptr, job.dtype},
                      wire, job.exchange.out);
}

template <typename Block>
__global__ void __launch_bounds__(kEncodedThreads)
    two_shot_kernel(const __grid_constant__ EncodedJob job) {
  const EnteredCall call = enter_call(job.exchange);
  const int first = first_slot(job, call), second = first + job.exchange.table.size;
  push_shards<Block>(job, first, receiver_of(job, call));
  if (!exchange_flags(job.exchange, 0, call, bytes_of(job))) return;
  push_sum<Block>(job, first, second);
  if (!exchange_flags(job.exchange, 1, call, bytes_of_own(job))) return;
  take_shards<Block>(job, second);
}

template <typename Block>
__global__ void __launch_bounds__(kEncodedThreads)
    reduce_scatter_kernel(const __grid_constant__ EncodedJob job) {
  const EnteredCall call = enter_call(job.exchange);
  const int first = first_slot(job, call);
  push_shards<Block>(job, first, receiver_of(job, call));
  if (!exchange_flags(job.exchange, 0, call, bytes_of(job))) return;
  add_messages<Block>(sum_of_shard(job, first), job.wires[job.exchange.table.rank],
                      job.exchange.out);
}

template <typename Block>
__global__ void __launch_bounds__(kEncodedThreads)
    all_gather_kernel(const __grid_constant__ EncodedJob job) {
  const EnteredCall call = enter_call(job.exchange);
  const int first = first_slot(job, call), rank = job.exchange.table.rank;
  push_to_all<Block>(job, job.wires[rank], {}, job.exchange.in,
                     shard_of_job(job, job.exchange.out, rank), first, receiver_of(job, call));
  if (!exchange_flags(job.exchange, 0, call, bytes_of_own(job))) return;
  take_shards<Block>(job, first);
}

/// Of the formats that `Has` is true of.
template <typename Has>
EncodedKernel encoded_kernel(const Wire& wire, EncodedOp op, Has) {
  return with_block(wire, [&]<typename Block>() -> EncodedKernel {
    if constexpr (Has()(typename Block::Format())) {
      switch (op) {
        case EncodedOp::one_shot_sum:
          return one_shot_kernel<Block>;
        case EncodedOp::two_shot_sum:
          return two_shot_kernel<Block>;
        case EncodedOp::reduce_scatter:
          return reduce_scatter_kernel<Block>;
        case EncodedOp::all_gather:
          return all_gather_kernel<Block>;
      }
    }
    return nullptr;
  });
}

}  // namespace tandem::gpu
