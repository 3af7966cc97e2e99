// For loading warps of kernels that wait for peers: waits behind which TMA reads what a peer wrote.
#pragma once

#include <cutlass/cutlass.h>

#include "comm/nccl/device_signal.cuh"

namespace tandem::gpu::fused {

/// wait_signal(), after which this thread's TMA loads may read what was written before the signal:
/// it was seen by ordinary loads, and TMA reads through another path.
CUTLASS_DEVICE void wait_for_load(const uint64_t* signal, uint64_t wanted, const Watch& watch,
                                  OpId op, int peer, int row) {
  wait_signal(signal, wanted, watch, op, peer, row);
  asm volatile("fence.proxy.async;" ::: "memory");
}

}  // namespace tandem::gpu::fused
