// Signals from kernels. Writer: data, then `release_signal`. Reader: one thread calls
// `wait_signal`, then a barrier lets the others read the data. Every wait for a peer ends: with the
// signal, or with false after the deadline or an abort, which the host turns into a typed error.
// Waits for another warp of the same block have no deadline: each states its bound.
#pragma once

#include <cuda_runtime.h>

#include "comm/device/device_signal.h"

namespace tandem::gpu {

/// Rank `step` ranks after this one, cyclically; 0 <= step < size.
__device__ inline int peer_at(const PeerTable& table, int step) {
  const int peer = table.rank + step;
  return peer < table.size ? peer : peer - table.size;
}

__device__ inline uint64_t acquire_signal(const uint64_t* signal) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(signal) : "memory");
  return value;
}

/// Release store: everything this thread wrote, or saw written across a block barrier, is visible
/// before the signal.
__device__ inline void release_signal(uint64_t* signal, uint64_t epoch) {
  asm volatile("fence.acq_rel.sys;\n\tst.relaxed.sys.global.u64 [%0], %1;" ::"l"(signal), "l"(epoch)
               : "memory");
}

/// Release addition, for a signal that counts: adds `count`.
__device__ inline void release_add(uint64_t* signal, uint64_t count) {
  asm volatile("fence.acq_rel.sys;\n\tred.relaxed.sys.global.add.u64 [%0], %1;" ::"l"(signal),
               "l"(count)
               : "memory");
}

__device__ inline uint64_t this_epoch(const CallCounter* calls) {
  return *const_cast<const volatile uint64_t*>(&calls->epoch) + 1;
}

/// Marks that a call timed out on a peer, which may still read data of earlier calls. Kernels that
/// send before they wait for a peer first check gave_up_before and then send nothing, since kernels
/// that are already enqueued do not see the host's error.
__device__ inline void give_up(CallCounter* calls, uint64_t epoch) {
  volatile uint64_t* lost = &calls->lost;
  if (*lost == 0) *lost = epoch;
}
__device__ inline bool gave_up_before(const CallCounter* calls, uint64_t epoch) {
  const uint64_t lost = *const_cast<const volatile uint64_t*>(&calls->lost);
  return lost != 0 && lost < epoch;
}

/// Called once by each of the `all` readers of this call's epoch, after its last read and, across a
/// barrier, that of the threads it represents. The last caller advances the epoch and resets the
/// count.
__device__ inline void finish_epoch_read(CallCounter* calls, unsigned all) {
  unsigned before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;"
               : "=r"(before)
               : "l"(&calls->readers)
               : "memory");
  if (before != all - 1) return;
  calls->readers = 0;
  calls->epoch += 1;
}

/// Loads 16 bytes that a peer may have stored; bypasses this SM's L1 cache.
__device__ inline uint4 load_fresh(const uint4* from) {
  uint4 words;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "l"(from)
               : "memory");
  return words;
}

__device__ inline uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

/// Low word of nanoseconds().
__device__ inline uint32_t timer_word() {
  uint32_t now;
  asm volatile("mov.u32 %0, %%globaltimer_lo;" : "=r"(now)::"memory");
  return now;
}

/// `state`: kTimeout or kMismatch.
__device__ inline void report_failure(int state, const Deadline& deadline, OpId op, int peer,
                                      long long tile, uint64_t epoch, uint64_t seen) {
  ErrorRecord* record = deadline.record;
  if (atomicCAS_system(&record->state, ErrorRecord::kNone, ErrorRecord::kWriting) !=
      ErrorRecord::kNone) {
    return;
  }
  record->op = int(op);
  record->peer = peer;
  record->tile = tile;
  record->epoch = epoch;
  record->seen = seen;
  __threadfence_system();
  *reinterpret_cast<volatile int*>(&record->state) = state;
}

__device__ inline void report_timeout(const Deadline& deadline, OpId op, int peer, long long tile,
                                      uint64_t epoch, uint64_t seen) {
  report_failure(ErrorRecord::kTimeout, deadline, op, peer, tile, epoch, seen);
}

/// Timer of a wait that was not satisfied at once.
struct WaitTimer {
  uint64_t begin = 0;
  __device__ void start() { begin = nanoseconds(); }
  __device__ bool has_passed(const Deadline& deadline) const {
    return nanoseconds() - begin > deadline.deadline_ns;
  }
};

/// Whether a wait of this rank has timed out or the host aborts. Reads host memory, which is far
/// slower than polling a signal in local memory, so waits check it seldom enough that the cost is
/// negligible.
__device__ inline bool has_failed(const Deadline& deadline) {
  return *reinterpret_cast<volatile int*>(&deadline.record->state) != ErrorRecord::kNone;
}

/// Waits until `signal` is at least `epoch`; false after the deadline or a failure. `below`:
/// low bits of the signal that count within an epoch; `epoch` includes them, the reported numbers
/// do not.
__device__ inline bool wait_signal(const uint64_t* signal, uint64_t epoch, const Deadline& deadline,
                                   OpId op, int peer, long long tile = -1, int below = 0) {
  if (acquire_signal(signal) >= epoch) return true;
  WaitTimer timer;
  timer.start();
  for (unsigned spin = 1;; ++spin) {
    const uint64_t seen = acquire_signal(signal);
    if (seen >= epoch) return true;
    if (spin % 1024 != 0) continue;  // local loads: under a millisecond
    if (has_failed(deadline)) return false;
    if (timer.has_passed(deadline)) {
      report_timeout(deadline, op, peer, tile, epoch >> below, seen >> below);
      return false;
    }
  }
}

}  // namespace tandem::gpu
