// A residual branch of a decoder layer, written once: training, evaluation and every form of
// generation run this. What differs between them is in the `Steps` that they bring: what moves
// between ranks beside the two products, where attention finds its keys, and where sums go.
#pragma once

#include <span>

#include "engine/model/views.h"
#include "engine/model/weights.h"
#include "kernels/norm.h"
#include "kernels/swiglu.h"

namespace tandem {

/// What a branch reads of the model.
struct LayerView {
  const ModelConfig& config;
  const ModelLayout& layout;
  const Weights& weights;

  std::span<const float> norm(const BranchLayout& branch) const {
    return weights.norm(branch.begin, config.hidden);
  }
};

/// Where a branch's values stand. `normed` has the rows of x and `inverse_rms` a value for each;
/// `hidden` and `inner` have the rows that the products work on.
struct BranchMemory {
  Tensor normed;
  std::span<float> inverse_rms;
  Tensor hidden, inner;
};

/// Norm, then the products (column-parallel, attention and / or SwiGLU, row-parallel), then the
/// experts, each where the branch has them. `Steps` has
///   in(normed, weight, hidden)             hidden = all rows of normed x weight^T
///   attention(q, k, v, out)
///   out(inner, weight)                     adds inner x weight^T, summed over the ranks, to the
///                                          residual stream, then or later
///   experts(normed, w_in, w_out)           routes the rows and adds what their experts give
/// The order of additions to the residual stream is this one everywhere, and with it the bits.
template <typename Steps>
void forward_branch(const LayerView& view, const BranchLayout& branch, const Tensor& x,
                    const BranchMemory& memory, Steps&& steps) {
  rms_norm_forward(x, view.norm(branch), view.config.norm_eps, memory.normed, memory.inverse_rms);
  if (branch.has_products()) {
    steps.in(memory.normed, view.weights.matrix(branch.in), memory.hidden);
    const HiddenViews hidden = split_hidden(view.layout, branch, memory.hidden);
    const InnerViews inner = split_inner(view.layout, branch, memory.inner);
    if (branch.attention) steps.attention(hidden.q, hidden.k, hidden.v, inner.attention);
    if (branch.mlp) swiglu_forward(hidden.gate, hidden.up, inner.mlp);
    steps.out(memory.inner, view.weights.matrix(branch.out));
  }
  if (branch.moe) {
    steps.experts(memory.normed, view.weights.matrix(branch.experts_in),
                  view.weights.matrix(branch.experts_out));
  }
}

}  // namespace tandem
