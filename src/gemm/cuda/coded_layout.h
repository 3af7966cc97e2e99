// Layout of a coded weight (gemm/coded_weight.h) in a GPU's memory. A step is 128 inputs: 128 bytes
// of a row's codes, and a word of its scales.
//
// - Codes are [rows, steps x 128], 0 after the last input. A word has the four inputs of 16 that a
//   lane t of a quad has of the tensor cores' operand, 2 t + {0, 1, 8, 9}, in bytes 0, 2, 1 and 3:
//   its even and odd bytes are pairs in a register. The lane reads its inputs of each half h of a
//   step as one vector, 2 t + h, so that the vectors which eight lanes read are in all banks of
//   TMA's 128-byte swizzle.
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
/// Place in a step of the word that lane `lane` % 4 of a quad reads of 16 inputs, `lane` / 4.
__host__ __device__ constexpr int coded_word(int lane) {
  const int sixteen = lane / 4;
  return (2 * (lane % 4) + sixteen / 4) * 4 + sixteen % 4;
}
#endif

}  // namespace tandem::gpu
