// One warp of a block that copies while the others multiply. What a fused kernel sends leaves from
// ordinary memory at the pace of the wire: no product's registers wait for it, and stores never
// pile up before the wire, where they would stop the processor's loads behind them.
#pragma once

#include <cstddef>

#include "comm/nccl/device_signal.cuh"

namespace tandem::gpu::fused {

class Courier {
 public:
  static constexpr int kAtOnce = 4;                      // packs of 16 bytes that a lane holds
  static constexpr int kRoundBytes = kAtOnce * 32 * 16;  // that the warp copies at once

  /// `lane`: 0 to 31. `pace`: least cycles from one round to the next.
  __device__ Courier(int lane, int pace) : lane_(lane), pace_(pace) {}

  /// By all lanes; `bytes` is a multiple of 16. The copy is visible after deliver().
  __device__ void carry(std::byte* to, const std::byte* from, int bytes) {
    for (int begin = lane_ * 16; begin < bytes; begin += kRoundBytes) {
      while (clock64() < next_) __nanosleep(20);
      next_ = clock64() + pace_;
      uint4 packs[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int at = begin + i * 512;
        if (at < bytes) packs[i] = load_fresh(reinterpret_cast<const uint4*>(from + at));
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int at = begin + i * 512;
        if (at < bytes) *reinterpret_cast<uint4*>(to + at) = packs[i];
      }
    }
  }

  /// All that was carried is visible to who sees the signal.
  __device__ void deliver(uint64_t* signal, uint64_t epoch) const {
    __syncwarp();
    if (lane_ == 0) release_signal(signal, epoch);
  }

 private:
  int lane_, pace_;
  long long next_ = 0;
};

}  // namespace tandem::gpu::fused
