// Waits in kernels that exchange data with peers, after which TMA reads data that a peer wrote, or
// overwrites data that a peer has read.
#pragma once

#include <cutlass/cutlass.h>

#include "comm/device/device_signal.cuh"

namespace tandem::gpu::fused {

/// wait_signal(), after which this thread's TMA loads and stores are ordered after everything
/// before the signal: the signal was seen through the generic proxy, TMA is in the async proxy.
CUTLASS_DEVICE bool wait_for_load(const uint64_t* signal, uint64_t wanted, const Deadline& deadline,
                                  OpId op, int peer, int row) {
  const bool there = wait_signal(signal, wanted, deadline, op, peer, row);
  asm volatile("fence.proxy.async;" ::: "memory");
  return there;
}

}  // namespace tandem::gpu::fused
