// Embedding at the bottom of the model; final norm, vocabulary-sharded logits and cross-entropy at
// its top.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/model/branch.h"

namespace tandem {

class Embedding {
 public:
  explicit Embedding(ModelContext& context);
  /// x: f32 [local rows, hidden].
  void forward(std::span<const int32_t> tokens, const Tensor& x);
  void backward(std::span<const int32_t> tokens, const Tensor& dx);

 private:
  ModelContext& context_;
  Activation looked_up_, shard_;
};

class Head {
 public:
  /// Collective.
  explicit Head(ModelContext& context);
  /// Returns the cross-entropy summed over targets, the same on every rank.
  double forward(const Tensor& x, std::span<const int32_t> targets, HeadActivations& saved);
  /// Writes dx; `dnorm` += this rank's contribution to the final norm's gradient.
  void backward(const Tensor& x, std::span<const int32_t> targets, float scale,
                const HeadActivations& saved, const Tensor& dx, std::span<float> dnorm);

 private:
  std::span<const float> norm_weight() const;
  /// Row `row` of an activation, one value per token.
  std::span<float> per_token(const Activation& values, int64_t row = 0) const {
    return {values->as<float>() + row * context_.tokens, size_t(context_.tokens)};
  }

  ModelContext& context_;
  AgGemm product_;
  GemmRs dgrad_;
  AgWgrad wgrad_;
  Activation dlogits_, dnormed_;
};

}  // namespace tandem
