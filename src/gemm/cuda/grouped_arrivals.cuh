// Device-side waits for rows: gathered ones sent by other ranks, and sorted ones written by a
// concurrent kernel.
#pragma once

#include "comm/device/device_signal.cuh"
#include "gemm/cuda/grouped.h"
#include "schedule/moe.h"

namespace tandem::gpu {

/// Called by a warp; each lane waits for one of the sources number `from` + 1 to `to`. If a source
/// times out, or an earlier call did, this call is marked as timed out.
__device__ inline void await_sources(const GroupedArrivals& arrivals, int from, int to, int lane) {
  const int step = from + 1 + lane;
  if (step <= to) {
    const int source = schedule::moe_source(arrivals.rank, arrivals.ranks, step);
    const uint64_t epoch = this_epoch(arrivals.calls);
    if (gave_up_before(arrivals.calls, epoch) ||
        !wait_signal(arrivals.arrived + source, epoch, arrivals.deadline, arrivals.op, source)) {
      give_up(arrivals.calls, epoch);
    }
  }
  __syncwarp();
}

/// Waits until all rows of a tile are written, for this thread's TMA loads. Needs no deadline: the
/// kernel that writes them is already running, and terminates.
__device__ inline void await_rows(const uint32_t* ready) {
  for (unsigned pause = 0;; pause = pause < 256 ? 2 * pause + 32 : pause) {
    uint32_t rows;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(rows) : "l"(ready) : "memory");
    if (rows >= kGroupedRows) break;
    __nanosleep(pause);  // else the loads of all blocks slow down the kernel that they wait for
  }
  asm volatile("fence.proxy.async;" ::: "memory");
}

/// Waits until `count` blocks of a concurrent kernel have started, which increment `begun`, or
/// until the deadline: their data is then missing, and the waits for it report that.
__device__ inline void await_blocks(const unsigned* begun, unsigned count,
                                    const Deadline& deadline) {
  WaitTimer timer;
  timer.start();
  while (*const_cast<const volatile unsigned*>(begun) < count) {
    if (has_failed(deadline) || timer.has_passed(deadline)) return;
    __nanosleep(64);
  }
}

}  // namespace tandem::gpu
