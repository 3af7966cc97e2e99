// Error feedback: what encoding loses is kept and added to the next values of the same place (1-bit
// SGD, Seide et al., Interspeech 2014, section 3; the same as EF-SGD, arXiv 1901.09847).
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "codec/numbers.h"
#include "tandem/codec.h"

namespace tandem::codec {

/// Elements [first, first + count) of `values` as floats, filled up to whole blocks, and back.
void widen_at(DType dtype, const std::byte* values, int64_t first, int count, float* to);
void narrow_at(DType dtype, const float* from, int64_t first, int count, std::byte* values);

/// The last of `count` values again, up to the end of its block.
inline void fill_up(float* tile, int count) {
  for (int i = count; i % kWireBlock != 0; ++i) tile[i] = tile[count - 1];
}

inline void add(const float* x, int count, float* to) {
  for (int i = 0; i < count; ++i) to[i] += x[i];
}

/// What was lost on the way; nothing where it is not a number.
inline void keep_error(const float* sent, const float* decoded, int count, float* residual) {
  for (int i = 0; i < count; ++i) {
    const float error = sent[i] - decoded[i];
    residual[i] = std::fabs(error) <= largest_of(DType::f32) ? error : 0;
  }
}

/// As `encode_whole`, of the values plus `residual`, f32 of as many elements, which then holds what
/// was lost. `residual` may be null; an exact wire leaves it alone.
size_t encode_with_feedback(const Wire& wire, DType dtype, const void* values, int64_t elements,
                            float* residual, std::byte* message);

}  // namespace tandem::codec
