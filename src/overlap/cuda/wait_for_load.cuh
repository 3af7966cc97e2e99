// For warps of kernels that wait for peers: waits behind which TMA reads what a peer wrote, or
// writes what a peer has read.
#pragma once

#include <cutlass/cutlass.h>

#include "comm/nccl/device_signal.cuh"
#include "overlap/cuda/shard_route.h"

namespace tandem::gpu::fused {

/// wait_signal(), after which this thread's TMA loads and stores come behind what was done before
/// the signal: it was seen by ordinary loads, and TMA takes another path.
CUTLASS_DEVICE bool wait_for_load(const uint64_t* signal, uint64_t wanted, const Watch& watch,
                                  OpId op, int peer, int row) {
  const bool there = wait_signal(signal, wanted, watch, op, peer, row);
  asm volatile("fence.proxy.async;" ::: "memory");
  return there;
}

/// What a chunk's signal has reached once it is here.
CUTLASS_DEVICE uint64_t wanted(ShardGate const& gate) {
  return (*const_cast<const volatile uint64_t*>(gate.epoch) + gate.ahead) * gate.parts;
}

}  // namespace tandem::gpu::fused
