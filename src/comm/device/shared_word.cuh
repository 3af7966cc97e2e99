// Release/acquire counters in shared memory, for warps of a block that signal each other without a
// barrier: writes before add_to_word are visible after the read_word that observes it.
#pragma once

#include <cuda_runtime.h>

namespace tandem::gpu {

__device__ inline unsigned address_of_word(const void* shared) {
  return unsigned(__cvta_generic_to_shared(shared));
}

__device__ inline void add_to_word(unsigned& word, unsigned value) {
  asm volatile("red.release.cta.shared::cta.add.u32 [%0], %1;" ::"r"(address_of_word(&word)),
               "r"(value)
               : "memory");
}

__device__ inline unsigned read_word(const unsigned& word) {
  unsigned value;
  asm volatile("ld.acquire.cta.shared::cta.u32 %0, [%1];"
               : "=r"(value)
               : "r"(address_of_word(&word))
               : "memory");
  return value;
}

}  // namespace tandem::gpu
