// How a block's consumers signal another of its warps that tiles are in global memory: a release/
// acquire counter in shared memory, which costs the consumers no GPU-wide fence. The reader may lag
// by any number.
#pragma once

#include <cutlass/arch/barrier.h>

#include "comm/device/device_signal.cuh"
#include "comm/device/shared_word.cuh"

namespace tandem::gpu::fused {

class Handover {
 public:
  /// By one thread, before anything else.
  CUTLASS_DEVICE void open() {
    CUTLASS_PRAGMA_UNROLL
    for (unsigned& count : published_) count = 0;
  }

  /// By all lanes of each consuming warp, when it has written its share of a tile.
  CUTLASS_DEVICE void publish() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      add_to_word(published_[threadIdx.x / kGroup - 1], 1);
    }
  }

  CUTLASS_DEVICE bool has_tiles(unsigned tiles) const {
    bool all = true;
    CUTLASS_PRAGMA_UNROLL
    for (int group = 0; group < kGroups; ++group) all &= seen(group) >= tiles * (kGroup / 32);
    return all;
  }

  /// Until the block's `tiles`-th tile is there, which bulk copies of this thread may then read;
  /// false where it timed out.
  CUTLASS_DEVICE bool wait_for_tile(unsigned tiles, Watch const& watch, int rank, int tile) const {
    bool here = has_tiles(tiles);
    if (!here) {
      // Seldom, and nothing is asked of the host's memory: every block waits so, much of the time.
      // So an abort is not seen here. Bounded by: the deadline, and the block's consuming warps,
      // which see it where they wait for a peer themselves.
      Deadline deadline;
      deadline.start();
      for (unsigned spin = 1; !(here = has_tiles(tiles)); ++spin) {
        __nanosleep(kSleep_ns);
        // Every 0.1 ms: the deadline is far longer.
        if (spin % 256 != 0 || !deadline.has_passed(watch)) continue;
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
  // A tile takes some 20 us to compute at K 8192: longer sleeps would delay its sending noticeably,
  // shorter ones take issue slots from the consumers.
  static constexpr unsigned kSleep_ns = 400;

  CUTLASS_DEVICE unsigned seen(int group) const { return read_word(published_[group]); }

  unsigned published_[kGroups];
};

}  // namespace tandem::gpu::fused
