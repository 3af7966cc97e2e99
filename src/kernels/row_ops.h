// Operations on rows that only some families of models have.
#pragma once

#include "core/exec.h"

namespace tandem {

/// Adds `bias`, f32 [columns], to every row of `rows`, [rows, columns], f32 or bf16.
void add_bias(const Exec& exec, const Tensor& bias, const Tensor& rows);

/// sums = sums of the columns of `rows`, f32 [columns], or added to them: gradient of the bias. On
/// a GPU throws Unsupported.
void column_sums(const Exec& exec, const Tensor& rows, const Tensor& sums, bool accumulate);

/// RMSNorm of each head of `rows`, [rows, heads x head_dim], f32 or bf16, with `weight`, f32
/// [head_dim], for all heads. Statistics are f32.
void rms_norm_heads(const Exec& exec, const Tensor& weight, double eps, const Tensor& rows);

/// Multiplies every row of `rows`, [rows, columns], by the sigmoid of its element of `gate`, [rows,
/// 1], both f32 or both bf16.
void gate_rows(const Exec& exec, const Tensor& gate, const Tensor& rows);

}  // namespace tandem
