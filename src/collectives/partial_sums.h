// Sum of all ranks' partial sums by the owner.
#pragma once

#include <cstddef>
#include <span>

#include "tandem/tensor.h"

namespace tandem {

/// out[i, j] = partials[0][i, j] + partials[1][i, j] + ... (in this order, in f32) + bias[j] +
/// residual[i, j], rounded once to out's dtype. Each partial is dense [rows, columns] of `dtype`;
/// out and residual have dense rows and one dtype, and may be the same. A dense `out` of `dtype`
/// may be one of the partials.
void reduce_partials(std::span<const std::byte* const> partials, DType dtype, const Tensor* bias,
                     const Tensor& out, const Tensor* residual = nullptr);

/// Copies a dense matrix into `out`, whose rows are dense; same shape and dtype.
void copy_rows(const std::byte* source, const Tensor& out);
/// Copies `source`, whose rows are dense, into a dense matrix.
void copy_rows(const Tensor& source, std::byte* out);

}  // namespace tandem
