// RMSNorm of rows whose columns are divided among ranks (OLMo2's norms of q and k): the ranks sum
// what the first of each pair of kernels writes, before the second. On CPUs.
#pragma once

#include <cstdint>

#include "core/exec.h"
#include "kernels/norm.h"

namespace tandem {

struct DividedNorm {
  int64_t columns;  ///< of all ranks
  double eps;
};

/// sums, f32 [rows] = sums of the squares of `rows`, [rows, columns here], f32 or bf16.
void divided_norm_squares(const Exec& exec, const Tensor& rows, const Tensor& sums);
/// Replaces `sums`, over all ranks, by 1 / sqrt(sum / norm.columns + norm.eps), the inverse RMS,
/// and `rows` by their norm with `weight`, [columns here]. `unnormalized` receives the rows as
/// they were; without dimensions it is not written.
void divided_norm_forward(const Exec& exec, const NormWeight& weight, const DividedNorm& norm,
                          const Tensor& rows, const Tensor& sums, const Tensor& unnormalized = {});

/// sums, f32 [rows] = products of the rows before the norm and the gradient of what `weight`
/// multiplies; `drows`: the gradient of the normalized rows.
void divided_norm_products(const Exec& exec, const NormWeight& weight, const Tensor& unnormalized,
                           const Tensor& drows, const Tensor& sums);
/// Replaces `drows` by the gradient of the rows before the norm, and adds to `dweight`, f32
/// [columns here]. `inverse_rms`: of the forward pass; `sums`: over all ranks.
void divided_norm_backward(const Exec& exec, const NormWeight& weight, const DividedNorm& norm,
                           const Tensor& unnormalized, const Tensor& inverse_rms,
                           const Tensor& sums, const Tensor& drows, const Tensor& dweight);

}  // namespace tandem
