// The residual branch of a layer whose MLP is a Mixture of Experts: norm, router, the experts that
// it chooses, wherever they are, and, where the model has one, the MLP that all tokens take beside
// them.
#pragma once

#include <memory>
#include <optional>
#include <span>

#include "kernels/moe.h"
#include "model/branch.h"
#include "model/expert_load.h"
#include "tandem/moe.h"

namespace tandem {

RouterOptions router_options(const ModelConfig& config);
MoeOptions moe_options(const OverlapOptions& overlap, const CodecPolicy& codec);

/// Operators and scratch that all branches with experts share. Collective to construct.
struct MoeOperators {
  explicit MoeOperators(ModelContext& context);
  MoeLayer layer;
  Activation routed, doutput, dnormed, normed, logits, dlogits, dweights, drouter;
};

class MoeBranch {
 public:
  /// `shared`: the operators of the MLP that all tokens take; nullptr: the layout has none.
  MoeBranch(ModelContext& context, MoeOperators& operators, BranchOperators* shared,
            const BranchLayout& layout);
  /// As of Branch. Counts what it chose in `load`.
  void forward(const Tensor& x, const Tensor& y, MoeActivations& kept, ExpertLoad* load);
  /// `balance`: gradient of the auxiliary loss by a row's probabilities; empty: none.
  void backward(const Tensor& x, const Tensor& dx, std::span<float> dnorm,
                const MoeActivations& kept, std::span<const float> balance);

 private:
  std::span<const float> norm_weight() const;
  std::span<const float> bias() const;
  const Tensor& router_input(const MoeActivations& kept);
  void router_backward(const MoeActivations& kept, std::span<const float> balance);

  ModelContext& context_;
  MoeOperators& operators_;
  BranchLayout layout_;
  std::unique_ptr<Branch> shared_;
};

}  // namespace tandem
