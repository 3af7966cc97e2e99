// Passes of a branch: its operations run on the tensors of its values, in the order of the list
// and, backward, in the reverse. Training, evaluation and all generation modes share the list; they
// differ in their Runner: communication around the two GEMMs, location of the keys, and destination
// of the sums. The order of additions to the residual stream is always the list's, so results are
// bitwise equal.
#pragma once

#include <functional>

#include "engine/model/views.h"
#include "engine/model/weights.h"
#include "kernels/norm.h"

namespace tandem {

/// Weight of a GEMM as a branch's steps are given it: its values, without data if they are stored
/// in another form, and its position in the layout.
struct LayerWeight {
  Tensor values;
  WeightMatrix matrix;
  operator const Tensor&() const { return values; }
};

/// Model as a branch reads it.
struct LayerView {
  const ModelConfig& config;
  const ModelLayout& layout;
  const Weights& weights;
  Exec exec;

  /// Weights of a norm from an offset on.
  NormWeight norm(int64_t offset, int64_t count) const {
    return {weights.vector(offset, count), config.zero_centered_norms ? 1.0f : 0.0f};
  }
  /// Norm before a branch, if it has one, and after all branches.
  NormWeight norm(const BranchLayout& branch) const {
    return branch.has_norm() ? norm(branch.begin, config.hidden) : NormWeight();
  }
  NormWeight final_norm() const { return norm(layout.final_norm, config.hidden); }
  LayerWeight weight(const WeightMatrix& matrix) const { return {weights.matrix(matrix), matrix}; }
};

namespace program {

/// Runs the operations that differ between training and the modes of generation, those whose rows
/// have no passes: GEMMs, attention, router and experts.
class Runner {
 public:
  virtual ~Runner() = default;
  virtual void forward(const Op& op, const Frame& frame) = 0;
  /// Replaces `terms`, f32, by their sums over the TP ranks.
  virtual void sum_over_ranks(const Tensor& terms) = 0;

  // Training only.
  virtual void backward(const Op&, const BackwardFrame&) {}
  /// Gradients of a GEMM's weights.
  virtual void backward_weight(const Op&, const BackwardFrame&) {}
  /// Gradient of `count` weights from `offset` on, f32, this rank's.
  virtual Tensor gradient(int64_t, int64_t) { return {}; }
  /// Whether the gradient at `offset` is added to what is there. Called before it is written.
  virtual bool adds_gradient(int64_t) { return false; }
  /// gradient (+)= the sum over the TP ranks of `term`, f32, which it replaces by the sum.
  virtual void sum_gradient(const Tensor&, int64_t) {}
};

/// Operands of a branch's operations.
struct Frame {
  const LayerView& view;
  const BranchLayout& branch;
  const Values& values;
  Runner& run;
  Tensor x = {};  ///< residual stream before the branch

  const Exec& exec() const { return view.exec; }
  const Tensor& at(ValueId value) const { return values[size_t(value)]; }
  /// Weights of an operation from its first one on, f32 [count].
  Tensor vector(const Op& op, int64_t count) const {
    return view.weights.vector(branch.offset(op), count);
  }
  /// Sinks of an attention's heads, f32; without dimensions if it has none.
  Tensor sinks(const Op& attention) const {
    return attention.weights.empty() ? Tensor() : vector(attention, view.layout.heads);
  }
};

struct BackwardFrame : Frame {
  const Values& gradients;  ///< of the values
  Tensor d_sum = {};        ///< gradient of the row-parallel GEMM's sum, if operations change it

  const Tensor& gradient(ValueId value) const { return gradients[size_t(value)]; }
};

/// Runs the operations that change the sum of the row-parallel GEMM, this rank's rows. A runner
/// calls it before it adds a complete sum to the residual stream.
void finish_sum(const LayerView& view, const BranchLayout& branch, const Values& values,
                const Tensor& sum);
/// Runs the first operation, on frame.x, or those after it.
void run_norm(Frame& frame);
void run_normalized(Frame& frame);
/// Runs the operations after the norm of a branch with experts: those before the router's are in
/// `meanwhile`, which the experts' operation calls while rows are sent.
void run_experts_first(Frame& frame, std::function<void()>& meanwhile);
/// Computes again what a layer with selective recomputation did not save.
void run_unsaved(Frame& frame);
/// The norm's pass is the last: it replaces the gradient that those of weights read. `is_split`:
/// leaves gradients of GEMMs' weights to run_backward_weight.
/// `meanwhile`: if not null, as in run_experts_first.
void run_backward(BackwardFrame& frame, bool is_split, std::function<void()>* meanwhile = nullptr);
void run_backward_weight(BackwardFrame& frame);

}  // namespace program
}  // namespace tandem
