// Building blocks of the kernels of all_reduce.h and one_shot_shards.h: slots in each other's
// memory, flags per block, sums in rank order. A kernel begins with enter_call in all threads, and
// finishes reading the epoch in its first exchange.
#pragma once

#include "collectives/cuda/exchange.h"
#include "comm/device/link_pacer.cuh"
#include "core/cuda/element.cuh"

namespace tandem::gpu {

// Signals: [exchange][source][block].
__device__ inline uint64_t* flag(const ExchangeParams& params, int at, int exchange, int source) {
  return params.table.signals[at] + (exchange * kMaxGpus + source) * kMaxExchangeBlocks +
         blockIdx.x;
}

struct CallState {
  uint64_t epoch;
  bool sends;  // true if no earlier call timed out on a peer
  /// Rank whose memory holds the slot to fill for `peer`: this rank if nothing is sent, as a branch
  /// would delay the kernel's first loads until the answer is known.
  __device__ int receiver(const ExchangeParams& params, int peer) const {
    return sends ? peer : params.table.rank;
  }
};

__device__ inline CallState enter_call(const ExchangeParams& params) {
  const uint64_t epoch = this_epoch(params.calls);
  return {epoch, !gave_up_before(params.calls, epoch)};
}

/// Signals that this block has stored its share of the bytes_to(peer) that the rank sends. Every
/// kernel runs exchange 0 once, first, and finishes reading the epoch under its wait: at the end of
/// the kernel it would wait for the atomic's result.
template <typename BytesTo>
__device__ void signal_peers(const ExchangeParams& params, int exchange, const CallState& call,
                             const BytesTo& bytes_to) {
  constexpr int kCounting = 64;  // a thread that signals no peer
  static_assert(kMaxGpus <= kCounting && kCounting < kFewExchangeThreads);
  __syncthreads();
  if (exchange == 0 && threadIdx.x == kCounting) finish_epoch_read(params.calls, gridDim.x);
  const int peer = int(threadIdx.x);
  if (call.sends && peer < params.table.size && peer != params.table.rank) {
    if (params.link_pacer)
      pace(params.link_pacer, (int64_t(bytes_to(peer)) + gridDim.x - 1) / int(gridDim.x));
    release_signal(flag(params, peer, exchange, params.table.rank), call.epoch);
  }
}

/// Waits until data stored here by the peers' blocks of the same index is readable; false if a wait
/// timed out: no peer may be signalled after that.
__device__ inline bool wait_for_peers(const ExchangeParams& params, int exchange,
                                      const CallState& call) {
  const int peer = int(threadIdx.x);
  bool came = call.sends;
  if (call.sends && peer < params.table.size && peer != params.table.rank) {
    // Exchange 1 waits for ranks that may still be waiting in exchange 0.
    const Deadline deadline = exchange == 0 ? params.deadline : extend_deadline(params.deadline);
    came = wait_signal(flag(params, params.table.rank, exchange, peer), call.epoch, deadline,
                       params.op, peer, blockIdx.x);
  }
  if (!came) give_up(params.calls, call.epoch);
  return __syncthreads_and(came);
}

template <typename BytesTo>
__device__ bool exchange_flags(const ExchangeParams& params, int exchange, const CallState& call,
                               const BytesTo& bytes_to) {
  signal_peers(params, exchange, call, bytes_to);
  return wait_for_peers(params, exchange, call);
}

/// Packs of this thread: first_vec(), then every vec_step().
__device__ inline int first_vec() {
  return int(blockIdx.x * blockDim.x + threadIdx.x);
}
__device__ inline int vec_step() {
  return int(gridDim.x * blockDim.x);
}

template <typename T>
__device__ Vec<T>* slot(const ExchangeParams& params, int at, int index) {
  return reinterpret_cast<Vec<T>*>(params.table.memory[at] + size_t(index) * params.slot_bytes);
}

template <typename T>
__device__ Vec<T> load_vec(const Vec<T>* from) {
  const uint4 words = load_fresh(reinterpret_cast<const uint4*>(from));
  return reinterpret_cast<const Vec<T>&>(words);
}

/// Calls store(peer, load(peer)) for every peer that `has` accepts. All loads precede all stores: a
/// load issued after a store would wait for that store's value, and every peer would cost one more
/// round trip to memory. Here and below, kRanks is the max number of ranks: instructions that only
/// skip missing ranks take time, too.
template <int kRanks, typename Words, typename Has, typename Load, typename Store>
__device__ void copy_by_peer(const PeerTable& table, const Has& has, const Load& load,
                             const Store& store) {
  Words words[kRanks];
#pragma unroll
  for (int step = 1; step < kRanks; ++step) {
    const int peer = peer_at(table, step);
    if (step < table.size && has(peer)) words[step] = load(peer);
  }
#pragma unroll
  for (int step = 1; step < kRanks; ++step) {
    const int peer = peer_at(table, step);
    if (step < table.size && has(peer)) store(peer, words[step]);
  }
}

/// Sums vec i of every rank, and of `last` if given, in this order in f32, rounded once.
template <int kRanks, typename T>
__device__ Vec<T> sum_slots(const ExchangeParams& params, const Vec<T>& local, int first_slot,
                            int64_t i, const Vec<T>* last = nullptr) {
  float sum[Vec<T>::kElements] = {};
  Vec<T> remote[kRanks];
#pragma unroll
  for (int r = 0; r < kRanks; ++r) {
    if (r < params.table.size && r != params.table.rank) {
      remote[r] = load_vec(slot<T>(params, params.table.rank, first_slot + r) + i);
    }
  }
#pragma unroll
  for (int r = 0; r < kRanks; ++r) {
    if (r >= params.table.size) continue;
#pragma unroll
    for (int e = 0; e < Vec<T>::kElements; ++e) {
      sum[e] += to_float(r == params.table.rank ? local.at[e] : remote[r].at[e]);
    }
  }
  if (last) {
#pragma unroll
    for (int e = 0; e < Vec<T>::kElements; ++e) sum[e] += to_float(last->at[e]);
  }
  Vec<T> result;
#pragma unroll
  for (int e = 0; e < Vec<T>::kElements; ++e) result.at[e] = from_float<T>(sum[e]);
  return result;
}

/// Calls body.operator()<kRanks>() with the smallest sufficient kRanks.
template <typename Body>
void with_ranks(int ranks, const Body& body) {
  if (ranks <= 2) return body.template operator()<2>();
  if (ranks <= 4) return body.template operator()<4>();
  body.template operator()<kMaxGpus>();
}

}  // namespace tandem::gpu
