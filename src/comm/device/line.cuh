// Kernel side of the emulated link pacer (line.h).
#pragma once

#include "comm/device/device_signal.cuh"
#include "comm/device/line.h"

namespace tandem::gpu {

/// Reserves the link for `bytes` sent now and returns the time at which they will have arrived. 0
/// bytes (only a signal) cost just the latency.
__device__ inline uint64_t reserve(Line* line, int64_t bytes) {
  const uint64_t now = nanoseconds();
  if (bytes <= 0) return now + line->latency_ns;
  const uint64_t taken = __float2ull_ru(__fmul_ru(__ll2float_ru(bytes), line->ns_per_byte));
  // Another thread between these two atomics only advances `busy_until`.
  atomicMax(&line->busy_until, now);
  return atomicAdd(&line->busy_until, taken) + taken + line->latency_ns;
}

/// Waits until `due`, or until a wait of this rank has failed.
__device__ inline void wait_until(const Line* line, uint64_t due) {
  Deadline deadline;
  deadline.record = const_cast<ErrorRecord*>(line->record);
  for (unsigned spin = 1; nanoseconds() < due; ++spin) {
    __nanosleep(64);
    if (spin % 1024 == 0 && has_failed(deadline)) return;
  }
}

/// Time at which everything reserved so far will have arrived.
__device__ inline uint64_t arrival_of_all(const Line* line) {
  const auto* busy_until = const_cast<const volatile unsigned long long*>(&line->busy_until);
  return max(static_cast<unsigned long long>(nanoseconds()), *busy_until) + line->latency_ns;
}

/// Delays a signal to another rank; called by the thread that raises it or by one that this thread
/// waits for. `bytes`: bytes stored there since the last signal. Returns when an emulated link
/// would have delivered them; immediately without one.
__device__ inline void pace(Line* line, int64_t bytes) {
  if (line) wait_until(line, reserve(line, bytes));
}

}  // namespace tandem::gpu
