// What the kernels of a Mixture-of-Experts layer's exchanges share (moe_exchange.h).
#pragma once

#include <algorithm>

#include "comm/device/device_signal.cuh"
#include "core/cuda/share.h"
#include "overlap/cuda/moe_exchange.h"

namespace tandem::gpu {

__device__ inline int warp_of_grid() {
  return int(blockIdx.x * blockDim.x + threadIdx.x) / 32;
}
__device__ inline int warps_of_grid() {
  return int(gridDim.x * blockDim.x) / 32;
}
__device__ inline int lane() {
  return int(threadIdx.x) % 32;
}

/// True in the last block that calls it with the same `count`, for all of its threads: what all
/// blocks have stored before is then ordered before what it signals.
__device__ inline bool is_last_block(unsigned* count) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    unsigned before;
    asm volatile("fence.acq_rel.sys;\n\tatom.acq_rel.gpu.global.add.u32 %0, [%1], 1;"
                 : "=r"(before)
                 : "l"(count)
                 : "memory");
    last = before == gridDim.x - 1;
    if (last) *count = 0;
  }
  __syncthreads();
  return last;
}

__device__ inline bool has_given_up(const MoeCall& call) {
  return *const_cast<const volatile uint64_t*>(&call.state->calls.lost) != 0;
}

template <typename T>
__device__ T* at(const MoeCall& call, int rank, size_t offset) {
  return reinterpret_cast<T*>(call.table.memory[rank] + offset);
}

/// By all threads: signal `first` + rank of every other rank; false where one did not come.
__device__ inline bool await(const MoeCall& call, int first, uint64_t epoch, const Watch& watch) {
  const int peer = int(threadIdx.x);
  bool came = true;
  if (peer < call.table.size && peer != call.table.rank) {
    came = wait_signal(call.table.signals[call.table.rank] + first + peer, epoch, watch,
                       OpId::all_to_all, peer);
    if (!came) give_up(&call.state->calls, epoch);
  }
  return __syncthreads_and(came);
}

/// Of the rows of `rank`, by this rank's memory; none on the way back.
__device__ inline const float* weights_of(const MoeCall& call, int rank) {
  return call.backward ? nullptr
                       : at<const float>(call, call.table.rank, call.space.weights_at(rank));
}

/// Of a grid that has `work` for so many blocks, `work_of_block` for each.
inline unsigned blocks_for(int64_t work, int work_of_block, int per_sm) {
  const int64_t blocks = (work + work_of_block - 1) / work_of_block;
  return unsigned(std::clamp<int64_t>(blocks, 1, this_share()->blocks(132 * per_sm, per_sm)));
}

}  // namespace tandem::gpu
