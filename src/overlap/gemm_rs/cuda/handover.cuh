// Signal from a block's consumers to another of its warps that tiles are in global memory: a
// release/acquire counter in shared memory, which costs the consumers no GPU-wide fence. The reader
// may lag by any number of tiles.
#pragma once

#include <cutlass/arch/barrier.h>

#include "comm/device/device_signal.cuh"
#include "comm/device/shared_word.cuh"
#include "overlap/contract/cuda/wait_ids.h"

namespace tandem::gpu::fused {

class Handover {
 public:
  /// Called by one thread, first.
  CUTLASS_DEVICE void open() {
    CUTLASS_PRAGMA_UNROLL
    for (unsigned& count : published_) count = 0;
  }

  /// Called by all lanes of each consumer warp, once it has written its share of a tile.
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

  /// Waits for the block's `tiles`-th tile, which this thread's bulk copies may then read; false if
  /// it timed out.
  CUTLASS_DEVICE bool wait_for_tile(unsigned tiles, Deadline const& deadline, int rank,
                                    int tile) const {
    bool here = has_tiles(tiles);
    if (!here) {
      // Rare polling without reads of host memory, since every block waits here much of the time;
      // an abort is therefore not seen here. Bounded by: the deadline, and the block's consumer
      // warps, which see the abort in their own waits for peers.
      WaitTimer timer;
      timer.start();
      for (unsigned spin = 1; !(here = has_tiles(tiles)); ++spin) {
        __nanosleep(kSleep_ns);
        // Checked every 0.1 ms: the deadline is far longer.
        if (spin % 256 != 0 || !timer.has_passed(deadline)) continue;
        report_timeout(deadline, kGemmRsWait, rank, tile, tiles, seen(0));
        break;
      }
    }
    asm volatile("fence.acq_rel.gpu;\n\tfence.proxy.async.global;" ::: "memory");
    return here;
  }

 private:
  // Consumer warpgroups, which follow the loading one. All warps of one multiply together, but for
  // short K one group may be tiles ahead of the other: each has its own count, in warps.
  static constexpr int kGroup = 128, kGroups = 2;
  // A tile takes some 20 us to compute at K 8192: longer sleeps would delay its sending noticeably,
  // shorter ones take issue slots from the consumers.
  static constexpr unsigned kSleep_ns = 400;

  CUTLASS_DEVICE unsigned seen(int group) const { return read_word(published_[group]); }

  unsigned published_[kGroups];
};

}  // namespace tandem::gpu::fused
