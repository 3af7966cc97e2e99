// Kernels of encoded_collectives.h, instantiated by encoded_instance.cu.in.
#pragma once

#include "collectives/cuda/encoded_pipeline.cuh"

namespace tandem::gpu {

/// First staging slot; staging alternates from call to call.
__device__ inline int first_slot(const EncodedJob& job, const CallState& call) {
  return int(call.epoch % 2) * 2 * job.exchange.table.size;
}
__device__ inline auto receiver_of(const EncodedJob& job, const CallState& call) {
  return [&](int peer) { return call.receiver(job.exchange, peer); };
}

/// Bytes of the message of any owner's shard, and of this rank's.
__device__ inline auto bytes_of(const EncodedJob& job) {
  return [&](int owner) { return job.wires[owner].parts.bytes; };
}
__device__ inline auto bytes_of_own(const EncodedJob& job) {
  return [&](int) { return job.wires[job.exchange.table.rank].parts.bytes; };
}

template <typename Block>
__global__ void __launch_bounds__(kEncodedThreads)
    one_shot_kernel(const __grid_constant__ EncodedJob job) {
  const CallState call = enter_call(job.exchange);
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
  const CallState call = enter_call(job.exchange);
  const int first = first_slot(job, call), second = first + job.exchange.table.size;
  push_shards<Block>(job, first, receiver_of(job, call));
  if (!exchange_flags(job.exchange, 0, call, bytes_of(job))) return;
  push_sum<Block>(job, first, second);
  if (!exchange_flags(job.exchange, 1, call, bytes_of_own(job))) return;
  take_shards<Block>(job, second);
}

template <typename Block>
__global__ void __launch_bounds__(kPipelineThreads, kPipelinesPerSm)
    pipelined_kernel(const __grid_constant__ EncodedJob job) {
  __shared__ WorkCounts counts;
  const CallState call = enter_call(job.exchange);
  if (int(threadIdx.x) < kTileStreams * kPipelineWorkers) {
    counts.done[threadIdx.x / kPipelineWorkers][threadIdx.x % kPipelineWorkers] = 0;
  }
  if (threadIdx.x == 0) counts.lost = 0;
  __syncthreads();
  const Tiles tiles{int(blockIdx.x), int(gridDim.x), kPipelineWorkers};
  const int64_t count = tiles.count(job.wires[0]);
  if (int(threadIdx.x) >= 32 * kPipelineWorkers) {
    if (threadIdx.x % 32 == 0) finish_epoch_read(job.exchange.calls, gridDim.x);
    __syncwarp();
    return signal_tiles(job, call, tiles, count, counts);
  }
  all_reduce_tiles<Block>(job, call, first_slot(job, call), receiver_of(job, call), tiles, count,
                          counts);
}

template <typename Block>
__global__ void __launch_bounds__(kEncodedThreads)
    reduce_scatter_kernel(const __grid_constant__ EncodedJob job) {
  const CallState call = enter_call(job.exchange);
  const int first = first_slot(job, call);
  push_shards<Block>(job, first, receiver_of(job, call));
  if (!exchange_flags(job.exchange, 0, call, bytes_of(job))) return;
  add_messages<Block>(sum_of_shard(job, first), job.wires[job.exchange.table.rank],
                      job.exchange.out);
}

template <typename Block>
__global__ void __launch_bounds__(kEncodedThreads)
    all_gather_kernel(const __grid_constant__ EncodedJob job) {
  const CallState call = enter_call(job.exchange);
  const int first = first_slot(job, call), rank = job.exchange.table.rank;
  push_to_all<Block>(job, job.wires[rank], {}, job.exchange.in,
                     shard_of_job(job, job.exchange.out, rank), first, receiver_of(job, call));
  if (!exchange_flags(job.exchange, 0, call, bytes_of_own(job))) return;
  take_shards<Block>(job, first);
}

template <typename Block>
constexpr Family family_of() {
  if (Block::transform == Transform::rotation) return Family::rotated;
  if (Block::transform == Transform::spikes) return Family::spiked;
  if (IsSmallFloat<typename Block::Format>) return Family::floats;
  return Block::kCentered ? Family::levels : Family::integers;
}

template <EncodedOp op, Family family>
EncodedKernel encoded_kernel(const Wire& wire) {
  return with_block(wire, [&]<typename Block>() -> EncodedKernel {
    if constexpr (family_of<Block>() == family) {
      if constexpr (op == EncodedOp::one_shot_sum) return one_shot_kernel<Block>;
      if constexpr (op == EncodedOp::two_shot_sum) return two_shot_kernel<Block>;
      if constexpr (op == EncodedOp::pipelined_sum) return pipelined_kernel<Block>;
      if constexpr (op == EncodedOp::reduce_scatter) return reduce_scatter_kernel<Block>;
      if constexpr (op == EncodedOp::all_gather) return all_gather_kernel<Block>;
    }
    return nullptr;
  });
}

}  // namespace tandem::gpu
