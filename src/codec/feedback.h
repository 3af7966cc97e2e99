// Error feedback: the encoding error is kept and added to the next values of the same elements
// (1-bit SGD, Seide et al., Interspeech 2014, section 3; the same as EF-SGD, arXiv 1901.09847).
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "codec/numbers.h"
#include "tandem/codec.h"

namespace tandem::codec {

/// Converts elements [first, first + count) of `values` to floats, padded to whole blocks, and
/// back.
void widen_at(DType dtype, const std::byte* values, int64_t first, int count, float* to);
void narrow_at(DType dtype, const float* from, int64_t first, int count, std::byte* values);

/// Repeats the last of `count` values up to the end of its block.
inline void fill_up(float* tile, int count) {
  for (int i = count; i % kWireBlock != 0; ++i) tile[i] = tile[count - 1];
}

inline void add(const float* x, int count, float* to) {
  for (int i = 0; i < count; ++i) to[i] += x[i];
}

/// Stores the encoding error; 0 if it is not finite.
inline void keep_error(const float* sent, const float* decoded, int count, float* residual) {
  for (int i = 0; i < count; ++i) {
    const float error = sent[i] - decoded[i];
    residual[i] = std::fabs(error) <= largest_of(DType::f32) ? error : 0;
  }
}

/// Same as `encode_whole`, of the values plus `residual` (f32, as many elements), which then holds
/// the encoding error. `residual` may be null; an exact wire leaves it unchanged.
size_t encode_with_feedback(const Wire& wire, DType dtype, const void* values, int64_t elements,
                            float* residual, std::byte* message);

}  // namespace tandem::codec
