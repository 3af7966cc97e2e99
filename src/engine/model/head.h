// Embedding at the bottom of the model; final norm, vocabulary-sharded logits and cross-entropy at
// its top.
#pragma once

#include <optional>

#include "engine/model/branch.h"

namespace tandem {

class Embedding {
 public:
  explicit Embedding(ModelContext& context);
  /// tokens: i32 [tokens]; x: f32 [local rows, hidden].
  void forward(const Tensor& tokens, const Tensor& x);
  /// dx: f32 or rounded to the dtype of GEMMs.
  void backward(const Tensor& tokens, const Tensor& dx);

 private:
  ModelContext& context_;
  Activation looked_up_, shard_;
  Activation order_;  // scratch of embedding_backward
};

class Head {
 public:
  /// Collective.
  explicit Head(ModelContext& context);
  /// Final norm, which the last branch computes.
  NextNorm norm(const HeadActivations& saved) const;
  /// Adds the cross-entropy, summed over targets, to the loss. `saved` must have the final norm.
  void forward(const Tensor& targets, HeadActivations& saved);
  /// Bytes of memory that microbatches share.
  size_t bytes() const { return dlogits_->bytes(); }
  /// Loss since the last call, the same on every rank. Waits for the stream.
  double take_loss();
  /// Writes dx as Branch::backward; `dnorm` += this rank's contribution to the final norm's
  /// gradient. The weight's gradient is left to backward_weight if the embedding that it is shares
  /// another stage's.
  void backward(const Tensor& x, const Tensor& targets, float scale, const HeadActivations& saved,
                const Tensor& dx, const Tensor& dnorm);
  void backward_weight(const HeadActivations& saved);

 private:
  Tensor norm_weight() const;
  /// Gradient of the logits; may replace them.
  const Tensor& dlogits(const HeadActivations& saved) const;

  ModelContext& context_;
  AgGemm product_;
  GemmRs dgrad_;
  std::optional<AgWgrad> wgrad_;
  Activation dlogits_;  // empty if they replace the logits or are saved
  Activation d_x_norm_;
  Memory loss_;  // a double
};

}  // namespace tandem
