// What the warps of a block of adding.h's kernel tell each other, in shared memory. Nobody waits to
// be heard.
#pragma once

#include <cute/arch/util.hpp>

#include <cstdint>

namespace tandem::gpu::fused {

template <int kGroups>
class BlockWords {
 public:
  /// By one thread of the block; a barrier of all must follow.
  __device__ void open() {
    readers_ = 0;
    for (int group = 0; group < kGroups; ++group) {
      stored_[group] = landed_[group][0] = landed_[group][1] = 0;
    }
  }

  /// By each thread that reads the epoch, when it has.
  __device__ void count_reader() { add_one(readers_); }
  __device__ unsigned readers() const { return read(readers_); }

  /// By the thread that stores a warpgroup's slices: one more of another rank's tiles is in memory,
  /// or was given up.
  __device__ void count_stored(int group) { add_one(stored_[group]); }
  __device__ bool are_stored(unsigned tiles) const {
    bool all = true;
    for (int group = 0; group < kGroups; ++group) all &= read(stored_[group]) >= tiles;
    return all;
  }

  /// All that the block's own tile `number`, counted from 1, adds to a warpgroup's rows has landed.
  __device__ void note_landed(int group, unsigned number) {
    asm volatile(
        "st.release.cta.shared::cta.u32 [%0], %1;" ::"r"(address(landed_[group][number % 2])),
        "r"(number)
        : "memory");
  }
  /// False where it was not noted, or a tile two further on was noted since.
  __device__ bool have_landed(unsigned number) const {
    bool all = true;
    for (int group = 0; group < kGroups; ++group) all &= read(landed_[group][number % 2]) == number;
    return all;
  }

 private:
  __device__ static uint32_t address(const unsigned& word) {
    return cute::cast_smem_ptr_to_uint(&word);
  }
  // What this thread read or wrote before comes before.
  __device__ static void add_one(unsigned& word) {
    asm volatile("red.release.cta.shared::cta.add.u32 [%0], 1;" ::"r"(address(word)) : "memory");
  }
  __device__ static unsigned read(const unsigned& word) {
    unsigned value;
    asm volatile("ld.acquire.cta.shared::cta.u32 %0, [%1];"
                 : "=r"(value)
                 : "r"(address(word))
                 : "memory");
    return value;
  }

  unsigned readers_;
  unsigned stored_[kGroups];
  unsigned landed_[kGroups][2];  // two, as the next one is noted before this one is read
};

}  // namespace tandem::gpu::fused
