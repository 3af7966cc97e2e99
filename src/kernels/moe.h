// Rows of a Mixture-of-Experts layer on CPU ranks: gathered to experts, and summed on the way back.
// All sums have a fixed order.
#pragma once

#include <cstdint>
#include <span>

#include "tandem/tensor.h"

namespace tandem {

/// One slot of an arrived row: a row of an expert's GEMM.
struct MoeUse {
  int32_t slot = 0, k = 0;  ///< k: which of the token's top_k
  float weight = 0;
};

/// to[use.slot] = from for all uses; `row_bytes` bytes a row.
void copy_to_slots(const std::byte* from, size_t row_bytes, std::span<const MoeUse> uses,
                   std::byte* to);

/// out[columns] = sum over uses of y[slot] (times its weight if `weighted`), in f32 in this order,
/// rounded once to `dtype`. y: f32, rows of `columns`.
void sum_uses(std::span<const MoeUse> uses, const float* y, int64_t columns, bool weighted,
              DType dtype, std::byte* out);

/// out = partials[0] + partials[1] + ... in f32; partials are `dtype`, out is `out_dtype`.
void sum_partials(std::span<const std::byte* const> partials, DType dtype, int64_t columns,
                  DType out_dtype, std::byte* out);

/// sums += weight x row, over `columns` elements.
void add_weighted(const float* row, float weight, int64_t columns, float* sums);

/// For each row i: d_gate_weight[i] = <d_act, inner>; scaled = weight x inner; d_act *= weight.
void scale_by_weight(const Tensor& inner, std::span<const float> weights, const Tensor& d_act,
                     const Tensor& scaled, std::span<float> d_gate_weight);

/// y[t] = x[t] + the sum over k of weights[t, k] x biases[chosen[t, k]]. x, y: f32 [rows, columns],
/// may be the same; chosen: i32 and weights: f32 [rows, top_k], -1: none; biases: f32 [experts,
/// columns].
void add_expert_biases(const Tensor& x, const Tensor& chosen, const Tensor& weights,
                       const Tensor& biases, const Tensor& y);
/// Its gradients, given that of y, f32 or bf16: adds to `dweights`, f32 [rows, top_k], and writes
/// `dbiases`, f32 [experts, columns].
void add_expert_biases_backward(const Tensor& dy, const Tensor& chosen, const Tensor& weights,
                                const Tensor& biases, const Tensor& dweights,
                                const Tensor& dbiases);

}  // namespace tandem
