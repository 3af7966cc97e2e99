// What a block of rows does inside a branch, whatever moves between the ranks.
#pragma once

#include <cstdint>

#include "infer/decoder.h"

namespace tandem {

/// Columns of the widest branch's `in` product, and of what its `out` product reads.
int64_t widest_in(const ModelLayout& layout);
int64_t widest_inner(const ModelLayout& layout);

/// The first rows x columns elements of scratch, as a matrix of its own.
inline Tensor reshaped(const Tensor& scratch, int64_t rows, int64_t columns) {
  return Tensor(scratch.data(), scratch.dtype(), {rows, columns});
}

/// Attention and SwiGLU of one branch on `count` rows of hidden (q | k | v | gate | up).
void run_inner(const DecoderContext& context, size_t branch, const Tensor& hidden, int64_t position,
               int64_t count, const Tensor& inner);

/// The branch's norm; inverse_rms has a value per row of x.
void run_norm(const DecoderContext& context, const BranchLayout& branch, const Tensor& x,
              float* inverse_rms, const Tensor& out);

}  // namespace tandem
