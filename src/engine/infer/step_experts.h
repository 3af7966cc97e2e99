// Experts of the rows of a decoder's step. Every rank holds a shard of each expert.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "engine/infer/decoder_context.h"
#include "overlap/moe/activation.h"
#include "tandem/moe.h"

namespace tandem {

class StepExperts {
 public:
  /// At most `rows` rows over all ranks. Collective.
  StepExperts(const DecoderContext& context, int64_t rows, const OverlapOptions& overlap);
  StepExperts(const StepExperts&) = delete;
  StepExperts& operator=(const StepExperts&) = delete;
  /// x (f32) += output of the experts for `x_norm`, rows of this rank; w_in and w_out hold all
  /// experts' weights, which are not coded. Collective.
  void add(const BranchLayout& branch, const Tensor& x_norm, const Tensor& w_in,
           const Tensor& w_out, const Tensor& x);
  /// `add` for rows that every rank has: each passes its share of them. Collective.
  void add_to_all(const BranchLayout& branch, const Tensor& x_norm, const Tensor& w_in,
                  const Tensor& w_out, const Tensor& x);
  /// Coded weights on CPU ranks, for rows that every rank has: writes this rank's sums to
  /// `partial`; their sum over the ranks is the experts' output. A row's bits do not depend on
  /// other rows.
  void compute_partial(const BranchLayout& branch, const Tensor& x_norm, const Tensor& partial);

 private:
  void choose(const BranchLayout& branch, const Tensor& x_norm);
  void add_expert(const BranchLayout& branch, int64_t expert, const Tensor& x_norm);

  DecoderContext context_;
  Activation input_, logits_, scores_, chosen_, weights_, out_;
  std::optional<MoeActivation> activation_;  ///< of layer_, which refers to it
  std::optional<MoeLayer> layer_;            ///< unless weights are coded
  MoeBatch batch_;
  Activation x_, gate_up_, inner_, product_;       ///< of a coded expert
  std::vector<std::pair<int64_t, float>> routed_;  ///< rows of an expert and their weights
};

}  // namespace tandem
