// Wire format of each communication site of a model.
#pragma once

#include <string>
#include <string_view>

#include "engine/model/config.h"
#include "tandem/codec.h"

namespace tandem {

struct CodecPolicy {
  /// Sums over tensor-parallel ranks of the attention output's and the MLP output's partial
  /// products, in the forward pass. One rank sends and encodes nothing.
  Wire attention{}, mlp{};
  /// Rows dispatched to the experts of a MoE layer, and their partial sums in the combine.
  Wire experts{};
  /// Rows at the two ends of the model, between tensor-parallel ranks: the embedding's output and,
  /// in training and evaluation, the rows gathered for the LM head GEMM. Logits are sent
  /// uncompressed.
  Wire embeddings{};
  /// Data-parallel training: gradients sent to the reduction, and updated weights sent back
  /// (engine/parallel/sharded/gradient_sync.h).
  Wire gradients{}, weights{};
  /// Pipeline parallelism: the residual stream between stages in the forward pass, and its gradient
  /// in the backward pass (engine/parallel/stage_links.h).
  Wire stages{};
  /// Context parallelism: rotated keys and values of attention, which all its queries then read
  /// rounded, in both passes (overlap/attention/shape.h).
  Wire keys{};

  /// Parses "int8" (sums of the forward pass) or one format per site, unnamed sites uncompressed:
  /// "mlp=int4:g32,embeddings=int8,gradients=int4:g32"; `attn` abbreviates attention. Throws
  /// InvalidArgument for an unknown site or format and for a site named twice.
  static CodecPolicy parse(std::string_view text);
  /// Text that `parse` accepts; "none" if nothing is compressed.
  std::string describe() const;
  bool is_none() const { return *this == CodecPolicy{}; }
  /// Throws InvalidArgument naming the codec that `config` on `tp` x `dp` ranks would ignore:
  /// forward-pass codecs with one tensor-parallel rank (for experts: if `ep` is 1, too), training
  /// codecs with one data-parallel rank; of stages with one; of keys with one context-parallel
  /// rank, or if its groups do not divide a head; an MLP codec if all MLPs are experts, an expert
  /// codec if there are none; two codecs in a parallel block, which has one sum. `dp`: 0 without
  /// training.
  void require_used(const ModelConfig& config, int tp, int dp = 0, int ep = 1, int pp = 1,
                    int cp = 1) const;
  bool operator==(const CodecPolicy&) const = default;
};

}  // namespace tandem
