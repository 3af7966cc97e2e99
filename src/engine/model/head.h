// Embedding at the bottom of the model; final norm, vocabulary-sharded logits and cross-entropy at
// its top.
#pragma once

#include "engine/model/branch.h"

namespace tandem {

class Embedding {
 public:
  explicit Embedding(ModelContext& context);
  /// tokens: i32 [tokens]; x: f32 [local rows, hidden].
  void forward(const Tensor& tokens, const Tensor& x);
  void backward(const Tensor& tokens, const Tensor& dx);

 private:
  ModelContext& context_;
  Activation looked_up_, shard_;
};

class Head {
 public:
  /// Collective.
  explicit Head(ModelContext& context);
  /// Returns the cross-entropy summed over targets, the same on every rank.
  double forward(const Tensor& x, const Tensor& targets, HeadActivations& saved);
  /// Writes dx; `dnorm` += this rank's contribution to the final norm's gradient.
  void backward(const Tensor& x, const Tensor& targets, float scale, const HeadActivations& saved,
                const Tensor& dx, const Tensor& dnorm);

 private:
  Tensor norm_weight() const;

  ModelContext& context_;
  AgGemm product_;
  GemmRs dgrad_;
  AgWgrad wgrad_;
  Activation dlogits_, dnormed_;
};

}  // namespace tandem
