// Mixture-of-Experts operations other than the GEMMs: routing, gathering rows to experts and
// summing them on the way back. All sums have a fixed order.
#pragma once

#include <cstdint>
#include <span>

#include "tandem/tensor.h"

namespace tandem {

struct RouterOptions {
  int top_k = 1;
  bool sigmoid = false;   ///< scores are sigmoid(logits), else softmax over the experts
  bool normalize = true;  ///< the chosen scores are divided by their sum
  float scale = 1;        ///< factor of the weights
};

/// logits: f32 [rows, experts] -> scores [rows, experts], experts i32 and weights f32 [rows,
/// top_k]. Picks the top_k largest of score + bias (the bias affects the choice, not the weight;
/// empty: none), the lower expert first on a tie. A row with a logit that is not finite gets NaN as
/// weights.
void route_forward(const Tensor& logits, std::span<const float> bias, const RouterOptions& options,
                   const Tensor& scores, const Tensor& experts, const Tensor& weights);

/// dlogits (overwritten): gradient through the weights, given `dweights`, plus that of the sum over
/// experts of balance[e] x p[e] for every row, with p the scores divided by their sum.
void route_backward(const Tensor& scores, const Tensor& experts, const Tensor& dweights,
                    std::span<const float> balance, const RouterOptions& options,
                    const Tensor& dlogits);

/// One slot of an arrived row: a row of an expert's GEMM.
struct MoeUse {
  int32_t slot = 0, k = 0;  ///< k: which of the token's top_k
  float weight = 0;
};

/// to[use.slot] = from for all uses; `line` bytes a row.
void place_row(const std::byte* from, size_t line, std::span<const MoeUse> uses, std::byte* to);

/// out[columns] = sum over uses of y[slot] (times its weight if `weighted`), in f32 in this order,
/// rounded once to `dtype`. y: f32, rows of `columns`.
void sum_uses(std::span<const MoeUse> uses, const float* y, int64_t columns, bool weighted,
              DType dtype, std::byte* out);

/// out = parts[0] + parts[1] + ... in f32; parts are `dtype`, out is `out_dtype`.
void sum_parts(std::span<const std::byte* const> parts, DType dtype, int64_t columns,
               DType out_dtype, std::byte* out);

/// For each row i: dots[i] = <d_act, inner>; scaled = weight x inner; d_act *= weight.
void scale_by_weight(const Tensor& inner, std::span<const float> weights, const Tensor& d_act,
                     const Tensor& scaled, std::span<float> d_gate_weight);

}  // namespace tandem
