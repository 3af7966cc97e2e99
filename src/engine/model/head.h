// Embedding at the bottom of the model; final norm, vocabulary-sharded logits and cross-entropy at
// its top.
#pragma once

#include <functional>
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
  /// Adds the cross-entropy, summed over targets, to the loss, unless backward passes do that.
  /// `saved` must have the final norm.
  void forward(const Tensor& targets, const HeadActivations& saved);
  /// Bytes of memory that microbatches share.
  size_t bytes() const { return dlogits_->bytes() + (chunk_ ? chunk_->bytes() : 0); }
  /// Loss since the last call, the same on every rank. Waits for the stream.
  double take_loss();
  /// Writes dx as Branch::backward; `dnorm` += this rank's contribution to the final norm's
  /// gradient. The weight's gradient is left to backward_weight if the embedding that it is shares
  /// another stage's.
  void backward(const Tensor& x, const Tensor& targets, float scale, const HeadActivations& saved,
                const Tensor& dx, const Tensor& dnorm);
  void backward_weight(const HeadActivations& saved);

 private:
  NormWeight norm_weight() const;
  /// Gradient of the logits; may replace them.
  const Tensor& dlogits(const HeadActivations& saved) const;
  /// Gradient of logits before their soft cap.
  void softmax_backward(const HeadLogits& of, const Tensor& targets, float scale,
                        const Tensor& dlogits);
  /// Logits of rows, and their cross-entropy.
  void add_loss(const Tensor& x_norm, const Tensor& targets, const HeadLogits& to);
  /// Calls visit(local rows, their targets on all ranks) for head_rows rows at a time.
  void for_each_chunk(const Tensor& targets,
                      const std::function<void(const Shard& rows, const Tensor& targets)>& visit);
  /// Loss, gradient of the final norm's output and of the weight, chunk by chunk.
  void backward_by_rows(const Tensor& targets, float scale, const HeadActivations& saved);

  ModelContext& context_;
  int64_t rows_;  // at a time
  AgGemm product_;
  GemmRs dgrad_;
  std::optional<AgWgrad> wgrad_;
  Activation dlogits_;               // empty if they replace the logits or are saved
  std::optional<HeadLogits> chunk_;  // with head_rows
  Activation chunk_targets_;         // i32 [1, rows]
  Activation d_x_norm_;
  Activation
      scaled_norm_;  ///< the norm's weight divided by logits_scaling; without rows if it is 1
  Memory loss_;      // a double
};

}  // namespace tandem
