// Operations on rows that only some families of models have.
#pragma once

#include <cstdint>
#include <span>

#include "core/exec.h"
#include "kernels/norm.h"

namespace tandem {

/// Adds `bias`, f32 [columns], to every row of `rows`, [rows, columns], f32 or bf16.
void add_bias(const Exec& exec, const Tensor& bias, const Tensor& rows);

/// sums = sums of the columns of `rows`, f32 [columns], or added to them: gradient of the bias.
void column_sums(const Exec& exec, const Tensor& rows, const Tensor& sums, bool accumulate);

/// RMSNorm of each head of `rows`, [rows, heads x head_dim], f32 or bf16, with `weight`,
/// [head_dim], for all heads. Statistics are f32. `unnormalized`: receives the rows as they were,
/// contiguous or not, for the backward pass; without dimensions it is not written. On a GPU throws
/// Unsupported for a head_dim above 512, and so does the gradient.
void rms_norm_heads(const Exec& exec, const NormWeight& weight, double eps, const Tensor& rows,
                    const Tensor& unnormalized = {});

/// Rows of scratch of rms_norm_heads_backward.
constexpr int64_t kHeadPartialSums = 512;
/// Gradient of rms_norm_heads: replaces `drows`, the gradient of its result, [rows, heads x
/// head_dim], by that of `unnormalized`, and adds to `dweight`, f32 [head_dim]. `partial_sums`:
/// scratch, f32 [kHeadPartialSums, head_dim], unused on a CPU.
void rms_norm_heads_backward(const Exec& exec, const Tensor& unnormalized, const NormWeight& weight,
                             double eps, const Tensor& drows, const Tensor& dweight,
                             const Tensor& partial_sums = {});

/// Multiplies every row of `rows`, [rows, columns], by the sigmoid of its element of `gate`, [rows,
/// 1], both f32 or both bf16.
void gate_rows(const Exec& exec, const Tensor& gate, const Tensor& rows);

/// Gradient of gate_rows: replaces `drows`, the gradient of its result `gated`, by that of the rows
/// before, and writes the gradient of `gate`, of these columns, to `dgate`, [rows, 1].
void gate_rows_backward(const Exec& exec, const Tensor& gate, const Tensor& gated,
                        const Tensor& drows, const Tensor& dgate);

/// Multiplies `rows`, [rows, columns], f32 or bf16, by a factor. On CPUs.
void scale_rows(const Exec& exec, const Tensor& rows, double factor);

/// Feature i of each head of `rows`, [rows, heads x order.size()], f32 or bf16, becomes that which
/// was at order[i], a permutation. On CPUs.
void permute_heads(const Exec& exec, const Tensor& rows, std::span<const int32_t> order);

}  // namespace tandem
