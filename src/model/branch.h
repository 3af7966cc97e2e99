// One residual branch of a layer, forward and backward, and the overlap operators that all branches
// of its kind share.
#pragma once

#include <memory>
#include <span>

#include "kernels/attention.h"
#include "model/microbatch.h"
#include "model/views.h"
#include "model/weights.h"
#include "tandem/communicator.h"
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

/// Operators and backward scratch: one branch runs at a time. Collective to construct.
struct BranchOperators {
  BranchOperators(ModelContext& context, const BranchLayout& layout);
  AgGemm in;
  GemmRs out;
  AgGemm out_dgrad;  ///< dgrad of a row-parallel product; its gather serves the wgrad
  GemmRs in_dgrad;
  AgWgrad in_wgrad;
  std::unique_ptr<Attention> attention;  ///< nullptr without
  Activation residual, doutput, dinner, dhidden, dnormed;
};

class Branch {
 public:
  Branch(ModelContext& context, BranchOperators& operators, const BranchLayout& layout);
  /// y = x + branch(x), both f32 [own rows, hidden]; x must stay until the backward pass.
  void forward(const Tensor& x, const Tensor& y, BranchActivations& kept);
  /// In: dx = gradient of y; out: gradient of x. `dnorm` += this rank's part of the norm's
  /// gradient. `kept`: what the forward pass left.
  void backward(const Tensor& x, const Tensor& dx, std::span<float> dnorm,
                const BranchActivations& kept);

 private:
  std::span<const float> norm_weight() const;

  ModelContext& context_;
  BranchOperators& operators_;
  BranchLayout layout_;
};

}  // namespace tandem
