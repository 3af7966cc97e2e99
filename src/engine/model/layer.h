// Residual branch of a decoder layer, shared by training, evaluation and all generation modes. They
// differ in their `Steps`: communication around the two GEMMs, location of the keys, and
// destination of the sums.
#pragma once

#include "engine/model/views.h"
#include "engine/model/weights.h"
#include "kernels/norm.h"
#include "kernels/row_ops.h"
#include "kernels/swiglu.h"

namespace tandem {

/// Weight of a GEMM as a branch's steps are given it: its values, without data if they are stored
/// in another form, and its position in the layout.
struct LayerWeight {
  Tensor values;
  WeightMatrix matrix;
  operator const Tensor&() const { return values; }
};

/// Parts of the model that a branch reads.
struct LayerView {
  const ModelConfig& config;
  const ModelLayout& layout;
  const Weights& weights;
  Exec exec;

  Tensor norm(const BranchLayout& branch) const {
    return weights.vector(branch.begin, config.hidden);
  }
  LayerWeight weight(const WeightMatrix& matrix) const { return {weights.matrix(matrix), matrix}; }
};

/// Memory of a branch. `x_norm` has the rows of x and `inverse_rms` one value for each; `hidden`
/// and `inner` have the rows that the GEMMs process.
struct BranchMemory {
  Tensor x_norm;
  Tensor inverse_rms;
  Tensor hidden, inner;
  /// [.., q | k] before the norms of their heads, for the backward pass; without dimensions:
  /// unsaved.
  Tensor unnormalized = {};
};

/// Adds biases to q, k and v and normalizes the heads of q and k, in place, if the model does.
/// `unnormalized`: as BranchMemory's.
inline void prepare_qkv(const LayerView& view, const BranchLayout& branch,
                        const HiddenViews& hidden, const Tensor& unnormalized) {
  if (branch.qkv_bias >= 0) {
    const Tensor bias = view.weights.vector(branch.qkv_bias, hidden.qkv.dim(1));
    add_bias(view.exec, bias, hidden.qkv);
  }
  if (branch.q_norm < 0) return;
  const int64_t head_dim = view.config.head_dim;
  const double eps = view.config.norm_eps;
  const auto [q, k] = split_unnormalized(view.layout, unnormalized);
  rms_norm_heads(view.exec, view.weights.vector(branch.q_norm, head_dim), eps, hidden.q, q);
  rms_norm_heads(view.exec, view.weights.vector(branch.q_norm + head_dim, head_dim), eps, hidden.k,
                 k);
}

/// The GEMMs (column-parallel, attention and / or SwiGLU, row-parallel), then the experts, each
/// if the branch has them, on the normalized rows in memory.x_norm. Weights are LayerWeight.
/// `Steps` has
///   in(x_norm, weight, hidden)             hidden = all rows of x_norm x weight^T
///   attention(q, k, v, out)
///   out(inner, weight)                     adds inner x weight^T, summed over the ranks, to the
///                                          residual stream, immediately or later
///   experts(x_norm, w_in, w_out)           routes the rows and adds the experts' outputs
/// The order of additions to the residual stream is always this one, so results are bitwise equal.
template <typename Steps>
void forward_normalized(const LayerView& view, const BranchLayout& branch,
                        const BranchMemory& memory, Steps&& steps) {
  if (branch.has_products()) {
    steps.in(memory.x_norm, view.weight(branch.in), memory.hidden);
    const HiddenViews hidden = split_hidden(view.layout, branch, memory.hidden);
    const InnerViews inner = split_inner(view.layout, branch, memory.inner);
    if (branch.attention) {
      prepare_qkv(view, branch, hidden, memory.unnormalized);
      steps.attention(hidden.q, hidden.k, hidden.v, inner.attention);
    }
    if (branch.mlp) swiglu_forward(view.exec, hidden.gate, hidden.up, inner.mlp);
    if (branch.has_shared_gate) gate_rows(view.exec, hidden.shared_gate, inner.mlp);
    steps.out(memory.inner, view.weight(branch.out));
  }
  if (branch.moe) {
    steps.experts(memory.x_norm, view.weight(branch.experts_in), view.weight(branch.experts_out));
  }
}

/// The same after the norm of x.
template <typename Steps>
void forward_branch(const LayerView& view, const BranchLayout& branch, const Tensor& x,
                    const BranchMemory& memory, Steps&& steps) {
  rms_norm_forward(view.exec, x, view.norm(branch), view.config.norm_eps, memory.x_norm,
                   memory.inverse_rms);
  forward_normalized(view, branch, memory, steps);
}

}  // namespace tandem
