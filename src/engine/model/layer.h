// Residual branch of a decoder layer in generation, all of whose modes have `Steps`: communication
// around the two GEMMs, location of the keys, and destination of the sums.
#pragma once

#include "engine/model/program/frame.h"
#include "kernels/outer_step.h"

namespace tandem {

/// Steps as the operations of a branch run them. Experts route their rows.
template <typename Steps>
struct StepsRunner final : program::Runner {
  explicit StepsRunner(Steps& steps_) : steps(steps_) {}
  void forward(const program::Op& op, const program::Frame& f) override {
    using namespace program;
    const BranchLayout& b = f.branch;
    if (op.row == &kColumnGemm) return steps.in(f.at(kXNorm), f.view.weight(b.in), f.at(kHidden));
    if (op.row == &kRowGemm) return steps.out(f.at(kInner), f.view.weight(b.out));
    if (op.row == &kAttention) {
      return steps.attention(f.at(op.in[0]), f.at(op.in[1]), f.at(op.in[2]), f.at(op.out[0]),
                             f.sinks(op));
    }
    if (op.row != &program::kExperts) return;
    steps.experts(f.at(kXNorm), f.view.weight(b.experts_in), f.view.weight(b.experts_out));
  }
  Steps& steps;
};

/// The branch's operations after its norm, on the normalized rows among `values`; with x, after the
/// norm of x. Weights are LayerWeight. `Steps` has
///   in(x_norm, weight, hidden)             hidden = all rows of x_norm x weight^T
///   attention(q, k, v, out, sinks)
///   out(inner, weight)                     adds inner x weight^T, summed over the ranks, to the
///                                          residual stream, immediately or later
///   experts(x_norm, w_in, w_out)           routes the rows and adds the experts' outputs
template <typename Steps>
void forward_branch(const LayerView& view, const BranchLayout& branch,
                    const program::Values& values, Steps&& steps, const Tensor& x = {}) {
  StepsRunner run(steps);
  program::Frame frame{view, branch, values, run, x};
  if (x.dims() > 0) run_norm(frame);
  run_normalized(frame);
}

/// Divides logits, f32 and contiguous, by the model's logits_scaling.
inline void scale_logits(const LayerView& view, const Tensor& logits) {
  if (view.config.logits_scaling == 1) return;
  scale(view.exec, logits, float(1 / view.config.logits_scaling), logits);
}

}  // namespace tandem
