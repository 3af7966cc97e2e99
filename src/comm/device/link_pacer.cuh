// Kernel side of the emulated link pacer (link_pacer.h).
#pragma once

#include "comm/device/device_signal.cuh"
#include "comm/device/link_pacer.h"

namespace tandem::gpu {

/// Reserves the link for `bytes` sent now and returns the time at which they will have arrived. 0
/// bytes (only a signal) cost just the latency.
__device__ inline uint64_t reserve(LinkPacer* pacer, int64_t bytes) {
  const uint64_t now = nanoseconds();
  if (bytes <= 0) return now + pacer->latency_ns;
  const uint64_t taken = __float2ull_ru(__fmul_ru(__ll2float_ru(bytes), pacer->ns_per_byte));
  // Another thread between these two atomics only advances `busy_until`.
  atomicMax(&pacer->busy_until, now);
  return atomicAdd(&pacer->busy_until, taken) + taken + pacer->latency_ns;
}

/// Waits until `due`, or until a wait of this rank has failed.
__device__ inline void wait_until(const LinkPacer* pacer, uint64_t due) {
  Deadline deadline;
  deadline.record = const_cast<ErrorRecord*>(pacer->record);
  for (unsigned spin = 1; nanoseconds() < due; ++spin) {
    __nanosleep(64);
    if (spin % 1024 == 0 && has_failed(deadline)) return;
  }
}

/// Time at which everything reserved so far will have arrived.
__device__ inline uint64_t arrival_of_all(const LinkPacer* pacer) {
  const auto* busy_until = const_cast<const volatile unsigned long long*>(&pacer->busy_until);
  return max(static_cast<unsigned long long>(nanoseconds()), *busy_until) + pacer->latency_ns;
}

/// Delays a signal to another rank; called by the thread that raises it or by one that this thread
/// waits for. `bytes`: bytes stored there since the last signal. Returns when an emulated link
/// would have delivered them; immediately without one.
__device__ inline void pace(LinkPacer* pacer, int64_t bytes) {
  if (pacer) wait_until(pacer, reserve(pacer, bytes));
}

}  // namespace tandem::gpu
