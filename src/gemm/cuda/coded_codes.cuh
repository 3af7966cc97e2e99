// Codes of a coded weight (coded_layout.h) as bf16, which holds each exactly.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "gemm/coded_weight.h"

namespace tandem::gpu {

__device__ inline __nv_bfloat162 bf16_pair(uint32_t bits) {
  __nv_bfloat162 pair;
  memcpy(&pair, &bits, sizeof pair);
  return pair;
}
__device__ inline uint32_t bits_of(__nv_bfloat162 pair) {
  uint32_t bits;
  memcpy(&bits, &pair, sizeof bits);
  return bits;
}

/// Codes of four inputs: pairs of the first two and the last two.
struct CodePairs {
  uint32_t first, last;
};

template <WeightFormat kFormat>
struct DeviceCodes;

/// (value & kMask) | bits. In C++ the compiler folds constant bits into an instruction of their
/// own: one has room for one constant.
template <uint32_t kMask>
__device__ inline uint32_t masked_or(uint32_t value, uint32_t bits) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(value), "n"(kMask), "r"(bits));
  return result;
}

/// 128 + the low 7 bits, minus 128 or, for negative codes, 256: all are bf16 numbers below 257.
template <>
struct DeviceCodes<WeightFormat::int8> {
  __device__ static uint32_t pair(uint32_t bytes) {
    constexpr uint32_t k128 = 0x43004300u;
    return bits_of(__hsub2(bf16_pair(masked_or<0x007f007fu>(bytes, k128)),
                           bf16_pair(masked_or<0x00800080u>(bytes, k128))));
  }
  __device__ static CodePairs pairs(uint32_t word) { return {pair(word), pair(word >> 8)}; }
  /// Scale of a half of the step.
  __device__ static float scale(uint32_t word, int half) {
    return __uint_as_float(half == 0 ? word << 16 : word & 0xffff0000u);
  }
};

/// Exponent and mantissa at their place in bf16 are the number / 2^120, also if it is subnormal.
template <>
struct DeviceCodes<WeightFormat::e4m3> {
  __device__ static uint32_t pair(uint32_t magnitudes, uint32_t signs) {
    const uint32_t bits = (magnitudes & 0x07f007f0u) | (signs & 0x80008000u);
    return bits_of(__hmul2(bf16_pair(bits), bf16_pair(0x7b807b80u)));
  }
  __device__ static CodePairs pairs(uint32_t word) {
    return {pair(word << 4, word << 8), pair(word >> 4, word)};
  }
  __device__ static float scale(uint32_t word, int) { return __uint_as_float(word); }
};

}  // namespace tandem::gpu
