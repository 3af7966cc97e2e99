// Shared-memory flags between the warps of a block of fused.h's kernel. No writer waits for a
// reader.
#pragma once

#include "comm/device/shared_word.cuh"

namespace tandem::gpu::fused {

template <int kGroups>
class BlockWords {
 public:
  /// Called by one thread of the block; a block-wide barrier must follow.
  __device__ void open() {
    epoch_ = 0;
    for (int group = 0; group < kGroups; ++group) {
      stored_[group] = arrived_[group][0] = arrived_[group][1] = 0;
    }
  }

  /// Called by one thread, once. Adds to 0: racecheck reports a polled plain store as a race.
  __device__ void publish_epoch(uint64_t epoch) {
    asm volatile("red.release.cta.shared::cta.add.u64 [%0], %1;" ::"r"(address_of_word(&epoch_)),
                 "l"(epoch)
                 : "memory");
  }
  /// Waits until the epoch is published. Bounded by: the block's helper warp, which publishes it
  /// first, before any wait.
  __device__ uint64_t epoch() const {
    uint64_t value;
    do {
      asm volatile("ld.acquire.cta.shared::cta.u64 %0, [%1];"
                   : "=l"(value)
                   : "r"(address_of_word(&epoch_))
                   : "memory");
    } while (value == 0);
    return value;
  }

  /// Called by the thread that stores a warpgroup's slices: one more remote tile is in memory, or
  /// its owner's wait timed out.
  __device__ void count_stored(int group) { add_to_word(stored_[group], 1); }
  __device__ bool are_stored(unsigned tiles) const {
    bool all = true;
    for (int group = 0; group < kGroups; ++group) all &= read_word(stored_[group]) >= tiles;
    return all;
  }

  /// Notes that all partials which the block's local tile `number`, counted from 1, adds to a
  /// warpgroup's rows have arrived. A max, as numbers grow and racecheck reports a plain store
  /// concurrent with a read as a race.
  __device__ void note_arrived(int group, unsigned number) {
    asm volatile("red.release.cta.shared::cta.max.u32 [%0], %1;" ::"r"(
                     address_of_word(&arrived_[group][number % 2])),
                 "r"(number)
                 : "memory");
  }
  /// False if it was not noted, or if a tile two later has been noted since.
  __device__ bool have_arrived(unsigned number) const {
    bool all = true;
    for (int group = 0; group < kGroups; ++group) {
      all &= read_word(arrived_[group][number % 2]) == number;
    }
    return all;
  }

 private:
  uint64_t epoch_;  // 0 until published
  unsigned stored_[kGroups];
  unsigned arrived_[kGroups][2];  // two, as the next is noted before this one is read
};

}  // namespace tandem::gpu::fused
