// A residual branch in training: the operators that all branches of its kind share, its forward
// pass (engine/model/layer.h says what a branch computes) and its backward pass.
#pragma once

#include <memory>
#include <span>

#include "engine/model/expert_load.h"
#include "engine/model/layer.h"
#include "engine/model/microbatch.h"
#include "kernels/attention.h"
#include "tandem/communicator.h"
#include "tandem/moe.h"
#include "tandem/overlap.h"

namespace tandem {

/// What every part of one Transformer reads.
struct ModelContext {
  ModelContext(Communicator& communicator, const ModelConfig& model,
               const TransformerOptions& transformer_options);
  Communicator& tp;
  Communicator& experts;  ///< EP x TP ranks
  ModelConfig config;
  TransformerOptions options;
  ModelLayout layout;
  Weights weights;
  Buffer gradient_memory;
  int64_t tokens;  ///< batch * seq
  Shard own;       ///< this rank's rows of the residual stream
  RopeTable rope;

  Tensor gradient(const WeightMatrix& m) const;
};

/// The products of a branch, attention between them, and backward scratch. One branch runs at a
/// time. Collective to construct.
struct BranchProducts {
  BranchProducts(ModelContext& context, const BranchLayout& layout);
  AgGemm in;
  GemmRs out;
  AgGemm out_dgrad;  ///< dgrad of a row-parallel product; its gather serves the wgrad
  GemmRs in_dgrad;
  AgWgrad in_wgrad;
  std::unique_ptr<Attention> attention;  ///< nullptr without
  Activation residual, doutput, dinner, dhidden, dnormed;
};

/// The experts of all branches that have them, and the router's scratch. Collective to construct.
struct BranchExperts {
  explicit BranchExperts(ModelContext& context);
  MoeLayer layer;
  Activation routed, doutput, dnormed, normed, logits, dlogits, dweights, drouter;
};

class Branch {
 public:
  /// `products` and `experts`: nullptr where the layout has none.
  Branch(ModelContext& context, BranchProducts* products, BranchExperts* experts,
         const BranchLayout& layout);
  /// y = x + branch(x), both f32 [own rows, hidden]; x must stay until the backward pass. Counts
  /// what the router chose in `load`, unless that is nullptr.
  void forward(const Tensor& x, const Tensor& y, BranchActivations& kept, ExpertLoad* load);
  /// In: dx = gradient of y; out: gradient of x. `dnorm` += this rank's part of the norm's
  /// gradient. `kept`: what the forward pass left. `balance`: gradient of the auxiliary loss by a
  /// row's probabilities; empty: none.
  void backward(const Tensor& x, const Tensor& dx, std::span<float> dnorm,
                const BranchActivations& kept, std::span<const float> balance);

 private:
  struct Steps;
  LayerView view() const;
  /// dx += what comes back through the norm.
  void norm_backward(const Tensor& x, const Tensor& dnormed, const BranchActivations& kept,
                     const Tensor& dx, std::span<float> dnorm);
  void products_backward(const Tensor& dy, const BranchActivations& kept);
  void experts_backward(const Tensor& dy, const BranchActivations& kept,
                        std::span<const float> balance);
  void router_backward(const BranchActivations& kept, std::span<const float> balance);

  ModelContext& context_;
  BranchProducts* products_;
  BranchExperts* experts_;
  BranchLayout layout_;
};

}  // namespace tandem
