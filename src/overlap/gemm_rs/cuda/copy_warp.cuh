// Copy loop for one thread of a block while the others multiply. Data sent by a fused kernel is
// read from global memory and sent at the link's rate: no accumulators wait for it, and stores
// never queue up at the link, where the SM's loads would stall.
//
// Uses bulk copies through shared memory: enough are in flight to cover memory latency, which the
// few registers of a producer warp could not. The thread's state is in shared memory too, for the
// same reason.
#pragma once

#include <cutlass/arch/barrier.h>

#include <cstddef>
#include <cstdint>
#include <cute/arch/copy_sm90_tma.hpp>

#include "comm/device/device_signal.cuh"

namespace tandem::gpu::fused {

/// Lives in shared memory; all methods are called by one thread.
class PacedBulkCopier {
 public:
  static constexpr int kChunk = 2048;  // bytes of a copy: longer bursts block this SM's loads
  // 16 KiB of shared memory, taken from the operands' stages. At most kBuffers - kAhead stores have
  // yet to read theirs; with more buffers and an exact pace, sending disturbed the main loop more
  // (docs/results/gpu-experiments.md).
  static constexpr int kBuffers = 8;
  // Chunks read ahead of their store: 8 KiB in flight cover the latency of an L2 read at a block's
  // share of the link, some 2.6 bytes/ns. At most kBuffers - 1.
  static constexpr int kAhead = 4;

  /// Called by one thread, first.
  CUTLASS_DEVICE void open() {
    chunk_ = 0;
    next_ns_ = 0;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kBuffers; ++i) cutlass::arch::ClusterBarrier::init(&full_[i], 1);
    cutlass::arch::fence_barrier_init();
    cutlass::arch::fence_view_async_shared();
  }

  /// Copies kChunk x `chunks` bytes (`chunks` >= kAhead) that this thread's bulk copies may read:
  /// their writes must precede a fence.proxy.async. `pace_ns`: min time between chunks. `arrived()`
  /// is called once during the copy, when everything copied before has arrived.
  template <class Arrived>
  CUTLASS_DEVICE void copy(std::byte* to, const std::byte* from, int chunks, int pace_ns,
                           Arrived&& arrived) {
    CUTLASS_PRAGMA_NO_UNROLL
    for (int i = -kAhead; i < chunks; ++i) {
      if (i < chunks - kAhead) fetch(chunk_ + uint32_t(i < 0 ? i + kAhead : kAhead), from);
      from += kChunk;
      if (i < 0) continue;
      store(to, pace_ns);
      to += kChunk;
      if (i != kAhead - 1) continue;
      wait_for_all_but<kAhead>();
      arrived();
    }
  }

  /// Waits until everything copied has arrived.
  CUTLASS_DEVICE void wait() const { wait_for_all_but<0>(); }

 private:
  /// Waits until the store that last used this buffer has read it: at most kBuffers - kAhead - 1
  /// stores were issued after that one.
  CUTLASS_DEVICE void fetch(uint32_t chunk, const std::byte* from) {
    cute::tma_store_wait<kBuffers - kAhead - 1>();
    const uint32_t buffer = chunk % kBuffers;
    cutlass::arch::ClusterTransactionBarrier::arrive_and_expect_tx(&full_[buffer], kChunk);
    cute::SM90_BULK_COPY_G2S::copy(from, &full_[buffer], buffers_[buffer], kChunk);
  }

  CUTLASS_DEVICE void store(std::byte* to, int pace_ns) {
    const uint32_t chunk = chunk_, buffer = chunk % kBuffers;
    cutlass::arch::ClusterBarrier::wait(&full_[buffer], chunk / kBuffers % 2);
    uint64_t now = nanoseconds();
    while (int64_t(next_ns_ - now) > 0) {
      __nanosleep(32);  // timer resolution; a chunk's pace is some 800 ns
      now = nanoseconds();
    }
    next_ns_ = now + pace_ns;
    cute::SM90_BULK_COPY_S2G::copy(buffers_[buffer], to, kChunk);
    cute::tma_store_arrive();
    chunk_ = chunk + 1;
  }

  // Waits until all copies of this thread but the latest `kPending` are complete and visible to it.
  template <int kPending>
  CUTLASS_DEVICE static void wait_for_all_but() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
  }

  alignas(128) std::byte buffers_[kBuffers][kChunk];
  alignas(8) uint64_t full_[kBuffers];
  uint64_t next_ns_;
  uint32_t chunk_;  // index of the next chunk, over all copies
};

}  // namespace tandem::gpu::fused
