// Kernels of encoded_collectives.h, instantiated by encoded_instance.cu.in.
#pragma once

#include "collectives/cuda/encoded_pipeline.cuh"

namespace tandem::gpu {

/// First staging slot; staging alternates from call to call.
__device__ inline int first_slot(const EncodedParams& params, const CallState& call) {
  return int(call.epoch % 2) * 2 * params.exchange.table.size;
}
__device__ inline auto receiver_of(const EncodedParams& params, const CallState& call) {
  return [&](int peer) { return call.receiver(params.exchange, peer); };
}

/// Bytes of the message of any owner's shard, and of this rank's.
__device__ inline auto bytes_of(const EncodedParams& params) {
  return [&](int owner) { return params.wires[owner].layout.bytes; };
}
__device__ inline auto local_bytes(const EncodedParams& params) {
  return [&](int) { return params.wires[params.exchange.table.rank].layout.bytes; };
}

template <typename Block>
__global__ void __launch_bounds__(kEncodedThreads)
    one_shot_kernel(const __grid_constant__ EncodedParams params) {
  const CallState call = enter_call(params.exchange);
  const int first = first_slot(params, call);
  const WireParams& wire = params.wires[0];
  push_to_all<Block>(params, wire, {params.residual, wire.layout.elements}, params.exchange.in,
                     nullptr, first, receiver_of(params, call));
  if (!exchange_flags(params.exchange, 0, call, [&](int) { return wire.layout.bytes; })) return;
  const PeerTable& table = params.exchange.table;
  add_messages<Block>({slot_of(params, table.rank, first), params.exchange.slot_bytes, table.size,
                       -1, nullptr, params.dtype},
                      wire, params.exchange.out);
}

template <typename Block>
__global__ void __launch_bounds__(kEncodedThreads)
    two_shot_kernel(const __grid_constant__ EncodedParams params) {
  const CallState call = enter_call(params.exchange);
  const int first = first_slot(params, call), second = first + params.exchange.table.size;
  push_shards<Block>(params, first, receiver_of(params, call));
  if (!exchange_flags(params.exchange, 0, call, bytes_of(params))) return;
  push_sum<Block>(params, first, second);
  if (!exchange_flags(params.exchange, 1, call, local_bytes(params))) return;
  take_shards<Block>(params, second);
}

template <typename Block>
__global__ void __launch_bounds__(kPipelineThreads, kPipelinesPerSm)
    pipelined_kernel(const __grid_constant__ EncodedParams params) {
  __shared__ WorkCounts counts;
  const CallState call = enter_call(params.exchange);
  if (int(threadIdx.x) < kTileStreams * kPipelineWorkers) {
    counts.done[threadIdx.x / kPipelineWorkers][threadIdx.x % kPipelineWorkers] = 0;
  }
  if (threadIdx.x == 0) counts.lost = 0;
  __syncthreads();
  const Tiles tiles{int(blockIdx.x), int(gridDim.x), kPipelineWorkers};
  const int64_t count = tiles.count(params.wires[0]);
  if (int(threadIdx.x) >= 32 * kPipelineWorkers) {
    if (threadIdx.x % 32 == 0) finish_epoch_read(params.exchange.calls, gridDim.x);
    __syncwarp();
    return signal_tiles(params, call, tiles, count, counts);
  }
  all_reduce_tiles<Block>(params, call, first_slot(params, call), receiver_of(params, call), tiles,
                          count, counts);
}

template <typename Block>
__global__ void __launch_bounds__(kEncodedThreads)
    reduce_scatter_kernel(const __grid_constant__ EncodedParams params) {
  const CallState call = enter_call(params.exchange);
  const int first = first_slot(params, call);
  push_shards<Block>(params, first, receiver_of(params, call));
  if (!exchange_flags(params.exchange, 0, call, bytes_of(params))) return;
  add_messages<Block>(sum_of_shard(params, first), params.wires[params.exchange.table.rank],
                      params.exchange.out);
}

template <typename Block>
__global__ void __launch_bounds__(kEncodedThreads)
    all_gather_kernel(const __grid_constant__ EncodedParams params) {
  const CallState call = enter_call(params.exchange);
  const int first = first_slot(params, call), rank = params.exchange.table.rank;
  push_to_all<Block>(params, params.wires[rank], {}, params.exchange.in,
                     shard_of_params(params, params.exchange.out, rank), first,
                     receiver_of(params, call));
  if (!exchange_flags(params.exchange, 0, call, local_bytes(params))) return;
  take_shards<Block>(params, first);
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
