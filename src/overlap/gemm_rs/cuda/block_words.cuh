// What the warps of a block of adding.h's kernel tell each other, in shared memory. Nobody waits to
// be heard.
#pragma once

#include "comm/nccl/shared_word.cuh"

namespace tandem::gpu::fused {

template <int kGroups>
class BlockWords {
 public:
  /// By one thread of the block; a barrier of all must follow.
  __device__ void open() {
    epoch_ = 0;
    for (int group = 0; group < kGroups; ++group) {
      stored_[group] = landed_[group][0] = landed_[group][1] = 0;
    }
  }

  /// By one thread, once. Added to 0, as racecheck takes a store that is waited for for a race.
  __device__ void give_epoch(uint64_t epoch) {
    asm volatile("red.release.cta.shared::cta.add.u64 [%0], %1;" ::"r"(address_of_word(&epoch_)),
                 "l"(epoch)
                 : "memory");
  }
  /// When it has been given.
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

  /// By the thread that stores a warpgroup's slices: one more of another rank's tiles is in memory,
  /// or was given up.
  __device__ void count_stored(int group) { add_to_word(stored_[group], 1); }
  __device__ bool are_stored(unsigned tiles) const {
    bool all = true;
    for (int group = 0; group < kGroups; ++group) all &= read_word(stored_[group]) >= tiles;
    return all;
  }

  /// All that the block's own tile `number`, counted from 1, adds to a warpgroup's rows has landed.
  /// A maximum, as numbers grow and racecheck takes a store beside a read for a race.
  __device__ void note_landed(int group, unsigned number) {
    asm volatile("red.release.cta.shared::cta.max.u32 [%0], %1;" ::"r"(
                     address_of_word(&landed_[group][number % 2])),
                 "r"(number)
                 : "memory");
  }
  /// False where it was not noted, or a tile two further on was noted since.
  __device__ bool have_landed(unsigned number) const {
    bool all = true;
    for (int group = 0; group < kGroups; ++group) {
      all &= read_word(landed_[group][number % 2]) == number;
    }
    return all;
  }

 private:
  uint64_t epoch_;  // 0 until it is given
  unsigned stored_[kGroups];
  unsigned landed_[kGroups][2];  // two, as the next one is noted before this one is read
};

}  // namespace tandem::gpu::fused
