// Scratch that all branches of a block of rows share.
#pragma once

#include <cstdint>

#include "engine/infer/decoder.h"

namespace tandem {

/// Columns of the widest branch's `in` product, and of what its `out` product reads.
int64_t widest_in(const ModelLayout& layout);
int64_t widest_inner(const ModelLayout& layout);

/// The first rows x columns elements of scratch, as a matrix of its own.
inline Tensor reshaped(const Tensor& scratch, int64_t rows, int64_t columns) {
  return Tensor(scratch.data(), scratch.dtype(), {rows, columns});
}

/// The branch's part of a block's scratch, for x with as many rows as `normed` and products of
/// `rows`.
inline BranchMemory branch_memory(const BranchLayout& branch, const Tensor& normed,
                                  const Tensor& inverse_rms, const Tensor& hidden,
                                  const Tensor& inner, int64_t rows) {
  return {normed,
          {inverse_rms.as<float>(), size_t(normed.dim(0))},
          reshaped(hidden, rows, branch.in.rows),
          reshaped(inner, rows, branch.out.columns)};
}

}  // namespace tandem
