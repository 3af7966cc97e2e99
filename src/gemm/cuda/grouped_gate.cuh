// How kernels wait for rows: for gathered ones that other ranks send, and for sorted ones that a
// kernel beside them puts into place.
#pragma once

#include "comm/device/device_signal.cuh"
#include "gemm/cuda/grouped.h"
#include "schedule/moe.h"

namespace tandem::gpu {

/// By a warp, each lane for one of the sources behind number `from`, up to number `to`. One that
/// does not come, or an earlier call that gave up, makes this call give up.
__device__ inline void await_sources(const GroupedGate& gate, int from, int to, int lane) {
  const int step = from + 1 + lane;
  if (step <= to) {
    const int source = schedule::moe_source(gate.rank, gate.ranks, step);
    const uint64_t epoch = this_epoch(gate.calls);
    if (gave_up_before(gate.calls, epoch) ||
        !wait_signal(gate.arrived + source, epoch, gate.watch, gate.op, source)) {
      give_up(gate.calls, epoch);
    }
  }
  __syncwarp();
}

/// Until all rows of a tile are in place, for this thread's TMA loads. Bounded: the kernel that
/// puts them there runs already, and ends.
__device__ inline void await_rows(const uint32_t* ready) {
  for (unsigned pause = 0;; pause = pause < 256 ? 2 * pause + 32 : pause) {
    uint32_t rows;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(rows) : "l"(ready) : "memory");
    if (rows >= kGroupedRows) break;
    __nanosleep(pause);  // else the loads of all blocks slow down the kernel that they wait for
  }
  asm volatile("fence.proxy.async;" ::: "memory");
}

/// Until `count` blocks of a kernel beside this one have begun, which add themselves to `begun`, or
/// to the deadline: what they were to do is then missing, and the waits for it say so.
__device__ inline void await_blocks(const unsigned* begun, unsigned count, const Watch& watch) {
  Deadline deadline;
  deadline.start();
  while (*const_cast<const volatile unsigned*>(begun) < count) {
    if (has_failed(watch) || deadline.has_passed(watch)) return;
    __nanosleep(64);
  }
}

}  // namespace tandem::gpu
