// Which wire format each site of a model uses.
#pragma once

#include <string>
#include <string_view>

#include "engine/model/config.h"
#include "tandem/codec.h"

namespace tandem {

struct CodecPolicy {
  /// The sums of the attention output's and of the MLP output's partial products over the
  /// tensor-parallel ranks, in the forward pass. At one rank nothing is sent, or encoded.
  Wire attention{}, mlp{};
  /// Rows on their way to the experts of a MoE layer, and their partial sums on the way back.
  Wire experts{};
  /// Rows at the ends of the model, between tensor-parallel ranks: those that the embedding looks
  /// up, and in training and evaluation those that the head's product gathers. Logits travel as
  /// they are.
  Wire embeddings{};
  /// Of training, between data-parallel ranks: gradients on their way to the sum, and updated
  /// weights on their way back (engine/parallel/data_parallel.h).
  Wire gradients{}, weights{};

  /// "int8" for the sums of the forward pass, or by site, where the others stay plain:
  /// "mlp=int4:g32,embeddings=int8,gradients=int4:g32"; `attn` is short for attention. Throws
  /// InvalidArgument for an unknown site or format and a site named twice.
  static CodecPolicy parse(std::string_view text);
  /// What `parse` turns into this; "none".
  std::string describe() const;
  bool is_none() const { return *this == CodecPolicy{}; }
  /// Throws InvalidArgument naming what `config` on `tp` x `dp` ranks would ignore: a codec of the
  /// forward pass at one tensor-parallel rank (of experts: where `ep` is 1, too), of training at
  /// one data-parallel rank; one for MLPs where there are only experts, or for experts where there
  /// are none; two in a parallel block, which has one sum. `dp`: 0 where nothing is trained.
  void require_used(const ModelConfig& config, int tp, int dp = 0, int ep = 1) const;
  bool operator==(const CodecPolicy&) const = default;
};

}  // namespace tandem
