// How kernels wait for gathered rows that other ranks send.
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

}  // namespace tandem::gpu
