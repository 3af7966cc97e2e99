// Product of small tiles of bf16 on tensor cores, from registers.
#pragma once

#include <cstdint>

namespace tandem::gpu {

/// d += a x b for a tile of 16 rows, 8 columns and 16 products, in the fragments of mma.m16n8k16.
__device__ inline void multiply_tile(float (&d)[4], const uint32_t (&a)[4],
                                     const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

}  // namespace tandem::gpu
