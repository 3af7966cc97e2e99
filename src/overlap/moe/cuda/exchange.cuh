// Shared by the dispatch and combine kernels of an MoE layer (exchange.h).
#pragma once

#include <algorithm>
#include <type_traits>

#include "comm/device/link_pacer.cuh"
#include "core/cuda/share.h"
#include "overlap/moe/cuda/exchange.h"

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

/// True for all threads of the last of `blocks` to call it with the same `count`: all earlier
/// stores of these blocks are then ordered before later signals.
__device__ inline bool is_last_block(unsigned* count, unsigned blocks = gridDim.x) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    unsigned before;
    asm volatile("fence.acq_rel.sys;\n\tatom.acq_rel.gpu.global.add.u32 %0, [%1], 1;"
                 : "=r"(before)
                 : "l"(count)
                 : "memory");
    last = before == blocks - 1;
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

/// Called by all threads: waits for signal `first` + rank of every other rank; false if one timed
/// out.
__device__ inline bool await(const MoeCall& call, int first, uint64_t epoch,
                             const Deadline& deadline) {
  const int peer = int(threadIdx.x);
  bool came = true;
  if (peer < call.table.size && peer != call.table.rank) {
    came = wait_signal(call.table.signals[call.table.rank] + first + peer, epoch, deadline,
                       OpId::all_to_all, peer);
    if (!came) give_up(&call.state->calls, epoch);
  }
  return __syncthreads_and(came);
}

/// Called by all threads once they have read what other ranks have sent for this call: reports a
/// rank that has abandoned a call since, as its pushes may have overwritten that.
__device__ inline void report_abandoned(const MoeCall& call, uint64_t epoch) {
  const int peer = int(threadIdx.x), rank = call.table.rank;
  __syncthreads();
  if (!call.peers_may_push || peer >= call.table.size || peer == rank) return;
  const uint64_t abandoned =
      acquire_signal(call.table.signals[rank] + MoeSpace::abandoned_signal(peer));
  if (abandoned == 0) return;
  report_timeout(call.deadline, OpId::all_to_all, peer, -1, epoch, abandoned);
  give_up(&call.state->calls, epoch);
}

/// Outgoing data of a kernel and its signals. Without an emulated link, signals are set at once.
/// With one, warps reserve link time for their stores and continue with the next rank; a signal is
/// set at the emulated arrival time of the data before it, by the thread that found all of it
/// stored.
template <bool kPaced>
class Outgoing {
 public:
  __device__ explicit Outgoing(LinkPacer* pacer) : pacer_(pacer) {}
  /// Called by a warp: bytes that it has stored in another rank's memory.
  __device__ void add(int64_t bytes) {
    if constexpr (kPaced) {
      if (lane() != 0) return;
      stored_ += bytes;
      if (stored_ >= kReservedBytes) reserve_stored();
      while (raised_ < queued_ && nanoseconds() >= due_[raised_]) raise();
    }
  }
  /// Called by all warps when everything for a rank has been stored.
  __device__ void end_rank() {
    if constexpr (kPaced) {
      if (lane() == 0 && stored_ > 0) reserve_stored();
    }
  }
  /// Called by the first thread of the last block to finish a rank.
  __device__ void tell(uint64_t* signal, uint64_t epoch) {
    if constexpr (kPaced) {
      signal_[queued_] = signal;
      due_[queued_++] = arrival_of_all(pacer_);
      epoch_ = epoch;
    } else {
      release_signal(signal, epoch);
    }
  }
  /// Called by all threads, last.
  __device__ void finish() {
    if constexpr (kPaced) {
      while (raised_ < queued_) {
        wait_until(pacer_, due_[raised_]);
        raise();
      }
    }
  }

 private:
  /// Times are rounded up to nanoseconds: smaller reservations would slow the link down.
  static constexpr int64_t kReservedBytes = 8192;

  __device__ void reserve_stored() {
    reserve(pacer_, stored_);
    stored_ = 0;
  }
  __device__ void raise() { release_signal(signal_[raised_++], epoch_); }

  LinkPacer* pacer_;
  int64_t stored_ = 0;
  int queued_ = 0, raised_ = 0;
  uint64_t epoch_ = 0;
  uint64_t* signal_[kMaxGpus];
  uint64_t due_[kMaxGpus];
};

/// Routing weights of the rows of `rank`, in this rank's memory; null in a backward pass.
__device__ inline const float* weights_of(const MoeCall& call, int rank) {
  return call.backward ? nullptr
                       : at<const float>(call, call.table.rank, call.space.weights_at(rank));
}

/// Blocks of a grid with `work` items, `work_of_block` per block.
inline unsigned blocks_for(int64_t work, int work_of_block, int per_sm) {
  const int64_t blocks = (work + work_of_block - 1) / work_of_block;
  return unsigned(std::clamp<int64_t>(blocks, 1, this_share()->blocks(132 * per_sm, per_sm)));
}

/// Calls body(std::bool_constant<whether there is an emulated link>{}).
template <typename Body>
void with_pacing(const MoeCall& call, const Body& body) {
  if (call.link_pacer) {
    body(std::true_type{});
  } else {
    body(std::false_type{});
  }
}

}  // namespace tandem::gpu
