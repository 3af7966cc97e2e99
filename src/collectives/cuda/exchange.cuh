// What the kernels of all_reduce.h and of one_shot_parts.h are made of: slots in each other's
// memory, flags per block, sums in rank order. A kernel reads the epoch first, by all threads; the
// first exchange counts that its block has.
#pragma once

#include "collectives/cuda/exchange.h"
#include "comm/nccl/device_signal.cuh"
#include "kernels/cuda/element.cuh"

namespace tandem::gpu {

__device__ inline uint64_t next_epoch(const ExchangeJob& job) {
  return *reinterpret_cast<volatile uint64_t*>(job.epoch) + 1;
}

// Signals: [exchange][source][block].
__device__ inline uint64_t* flag(const ExchangeJob& job, int at, int exchange, int source) {
  return job.table.signals[at] + (exchange * kMaxGpus + source) * kMaxExchangeBlocks + blockIdx.x;
}

// The last of the blocks advances the epoch. Under the wait for peers: at the end of the kernel the
// answer to the count would be waited for.
__device__ inline void count_block(const ExchangeJob& job) {
  __threadfence();
  count_reader(job.counted, gridDim.x, job.epoch);
}

/// What this block has stored is there. Exchange 0 counts the block: every kernel has it once,
/// first.
__device__ inline void signal_peers(const ExchangeJob& job, int exchange, uint64_t epoch) {
  constexpr int kCounting = 64;
  static_assert(kMaxGpus <= kCounting && kCounting < kExchangeThreads);
  __syncthreads();
  if (exchange == 0 && threadIdx.x == kCounting) count_block(job);
  const int peer = int(threadIdx.x);
  if (peer < job.table.size && peer != job.table.rank) {
    release_signal(flag(job, peer, exchange, job.table.rank), epoch);
  }
}

/// What this block's likes have stored here may be read.
__device__ inline void wait_for_peers(const ExchangeJob& job, int exchange, uint64_t epoch) {
  const int peer = int(threadIdx.x);
  if (peer < job.table.size && peer != job.table.rank) {
    wait_signal(flag(job, job.table.rank, exchange, peer), epoch, job.watch, job.op, peer,
                blockIdx.x);
  }
  __syncthreads();
}

__device__ inline void exchange_flags(const ExchangeJob& job, int exchange, uint64_t epoch) {
  signal_peers(job, exchange, epoch);
  wait_for_peers(job, exchange, epoch);
}

template <typename T>
__device__ Pack<T>* slot(const ExchangeJob& job, int at, int index) {
  return reinterpret_cast<Pack<T>*>(job.table.memory[at] + size_t(index) * job.slot_bytes);
}

template <typename T>
__device__ Pack<T> load_pack(const Pack<T>* from) {
  const uint4 words = load_fresh(reinterpret_cast<const uint4*>(from));
  return reinterpret_cast<const Pack<T>&>(words);
}

/// Pack i of every rank, and of `last` where it is given, added in this order in f32, rounded once.
template <typename T>
__device__ Pack<T> sum_slots(const ExchangeJob& job, const Pack<T>& mine, int first_slot, int64_t i,
                             const Pack<T>* last = nullptr) {
  float sum[Pack<T>::kElements] = {};
  Pack<T> parts[kMaxGpus];
#pragma unroll
  for (int r = 0; r < kMaxGpus; ++r) {
    if (r == job.table.rank) {
      parts[r] = mine;
    } else if (r < job.table.size) {
      parts[r] = load_pack(slot<T>(job, job.table.rank, first_slot + r) + i);
    }
  }
#pragma unroll
  for (int r = 0; r < kMaxGpus; ++r) {
    if (r >= job.table.size) continue;
#pragma unroll
    for (int e = 0; e < Pack<T>::kElements; ++e) sum[e] += to_float(parts[r].at[e]);
  }
  if (last) {
#pragma unroll
    for (int e = 0; e < Pack<T>::kElements; ++e) sum[e] += to_float(last->at[e]);
  }
  Pack<T> result;
#pragma unroll
  for (int e = 0; e < Pack<T>::kElements; ++e) result.at[e] = from_float<T>(sum[e]);
  return result;
}

}  // namespace tandem::gpu
