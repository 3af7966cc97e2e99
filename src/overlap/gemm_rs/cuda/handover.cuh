// How a block's consumers tell another of its warps that tiles lie in memory: a count in shared
// memory, which costs the consumers no fence of the whole GPU. The reader may lag by any number.
#pragma once

#include <cutlass/arch/barrier.h>

#include "comm/nccl/device_signal.cuh"
#include "comm/nccl/shared_word.cuh"

namespace tandem::gpu::fused {

class Handover {
 public:
  /// By one thread, before anything else.
  CUTLASS_DEVICE void open() {
    CUTLASS_PRAGMA_UNROLL
    for (unsigned& given : given_) given = 0;
  }

  /// By all lanes of each consuming warp, when it has written its part of a tile.
  CUTLASS_DEVICE void give() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      add_to_word(given_[threadIdx.x / kGroup - 1], 1);
    }
  }

  CUTLASS_DEVICE bool has(unsigned tiles) const {
    bool all = true;
    CUTLASS_PRAGMA_UNROLL
    for (int group = 0; group < kGroups; ++group) all &= seen(group) >= tiles * (kGroup / 32);
    return all;
  }

  /// Until the block's `tiles`-th tile is there, which bulk copies of this thread may then read;
  /// false where it gave up.
  CUTLASS_DEVICE bool take(unsigned tiles, Watch const& watch, int rank, int tile) const {
    bool here = has(tiles);
    if (!here) {
      // Seldom, and nothing is asked of the host's memory: every block waits so, much of the time.
      const uint64_t begin = nanoseconds();
      for (unsigned spin = 1; !(here = has(tiles)); ++spin) {
        __nanosleep(kSleep_ns);
        if (spin % 256 != 0 || nanoseconds() - begin <= watch.deadline_ns) continue;
        report_timeout(watch, OpId::gemm_rs, rank, tile, tiles, seen(0));
        break;
      }
    }
    asm volatile("fence.acq_rel.gpu;\n\tfence.proxy.async.global;" ::: "memory");
    return here;
  }

 private:
  // Consuming warpgroups, which follow the loading one. Of one all warps multiply together, but one
  // group may be tiles ahead of the other where K is short: each has its own count, of its warps.
  static constexpr int kGroup = 128, kGroups = 2;
  static constexpr unsigned kSleep_ns = 400;

  CUTLASS_DEVICE unsigned seen(int group) const { return read_word(given_[group]); }

  unsigned given_[kGroups];
};

}  // namespace tandem::gpu::fused
