// Layout of a coded weight (gemm/coded_weight.h) in a GPU's memory. A step is 128 inputs: 128 bytes
// of a row's codes, and a word of its scales.
//
// - Codes are [rows, steps x 128], 0 after the last input. A lane of a quad reads 16 inputs of
//   each half of a step as one vector: lane t has inputs 64 h + 16 t + [0, 16) in vector 2 t + h,
//   so that the vectors which eight lanes read are in all banks of TMA's 128-byte swizzle. A word
//   of four inputs has them in bytes 0, 2, 1 and 3: its even and odd bytes are pairs in a register.
// - Scales are words [steps, rows padded to a multiple of 4]: two bf16, of both halves, or one f32.
#pragma once

#include <cstdint>

namespace tandem::gpu {

constexpr int kCodedStep = 128;
constexpr int kCodedWords = kCodedStep / 4;  ///< of a row's codes in a step

constexpr int64_t coded_steps(int64_t columns) {
  return (columns + kCodedStep - 1) / kCodedStep;
}

#if defined(__CUDACC__)
/// Word of a step with the codes of inputs 4 `four` + [0, 4).
__host__ __device__ constexpr int coded_word(int four) {
  const int half = four / 16, lane = four % 16 / 4;
  return (2 * lane + half) * 4 + four % 4;
}
#endif

}  // namespace tandem::gpu
