// Words in shared memory by which warps of a block tell each other something without a barrier:
// what the writer did before comes before what the reader does behind it.
#pragma once

#include <cute/arch/util.hpp>

#include <cstdint>

namespace tandem::gpu::fused {

__device__ inline void add_to_word(unsigned& word, unsigned value) {
  asm volatile(
      "red.release.cta.shared::cta.add.u32 [%0], %1;" ::"r"(cute::cast_smem_ptr_to_uint(&word)),
      "r"(value)
      : "memory");
}

__device__ inline unsigned read_word(const unsigned& word) {
  unsigned value;
  asm volatile("ld.acquire.cta.shared::cta.u32 %0, [%1];"
               : "=r"(value)
               : "r"(cute::cast_smem_ptr_to_uint(&word))
               : "memory");
  return value;
}

}  // namespace tandem::gpu::fused
