// Where each weight of one rank's share of the model stands in its flat arrays.
//
// A decoder layer is a list of branches, each norm -> column-parallel product -> heads and / or
// SwiGLU -> row-parallel product -> residual add: attention then MLP, or both at once in a parallel
// block. What one product reads is one fused matrix: `in` is [q | k | v | gate | up] by rows, `out`
// is [attention | MLP] by columns; the Hugging Face tensors are row or column ranges of these.
// Order: embedding, layers, final norm, head. A tied head is the embedding. Behind them stand this
// rank's experts, layer by layer: of each one [gate | up] by rows, then the down projections.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/model/config.h"
#include "engine/model/transformer.h"

namespace tandem {

/// A row-major matrix in the flat arrays.
struct WeightMatrix {
  int64_t offset = 0, rows = 0, columns = 0;
};

struct BranchLayout {
  bool attention = false, mlp = false, moe = false;
  int64_t begin = 0;  ///< of the branch's first element; its norm stands here
  WeightMatrix in, out;
  int64_t ffn = 0;  ///< of this rank's part of the MLP
  // With experts; an MLP beside them is the shared one.
  int moe_layer = -1;  ///< number among those with experts
  WeightMatrix router;
  int64_t router_bias = -1;              ///< where it stands; -1: none
  WeightMatrix experts_in, experts_out;  ///< [experts here x 2 ffn, hidden], [.. x hidden, ffn]
  /// Whether there are `in` and `out`.
  bool has_products() const { return attention || mlp; }
};

/// Branches of a kind have the same shapes, and so share operators: attention (with or without an
/// MLP beside it), MLP, MLP beside experts.
constexpr size_t kBranchKinds = 3;
inline size_t kind_of(const BranchLayout& b) {
  return b.moe ? 2 : b.attention ? 0 : 1;
}

/// Of the branch's sums over ranks.
inline const Wire& wire_of(const CodecPolicy& policy, const BranchLayout& b) {
  return b.attention ? policy.attention : policy.mlp;
}
inline OverlapOptions with_wire(OverlapOptions options, const Wire& wire) {
  options.wire = wire;
  return options;
}

/// A rank's place among the EP ranks that share the experts.
struct ExpertPlace {
  int ep = 1, rank = 0;
};

class ModelLayout {
 public:
  /// Throws ConfigError when `config` does not fit `tp` and `place`.
  ModelLayout(const ModelConfig& config, int tp, int rank, ExpertPlace place = {});

  int64_t heads, kv_heads;     ///< of this rank
  int64_t q, kv;               ///< columns of this rank: heads * head_dim
  int64_t vocab_begin, vocab;  ///< this rank's rows of embedding and head
  WeightMatrix embedding, head;
  std::vector<BranchLayout> branches;
  int branches_per_layer;
  int64_t final_norm;
  int64_t experts_begin = 0;  ///< where the experts' part begins
  int64_t size = 0;           ///< elements of each flat array
  std::vector<Parameter> parameters;

 private:
  int64_t reserve(int64_t elements);
  void add_norm(const std::string& name, int64_t hidden);
  void add_branch(const ModelConfig& config, const std::string& layer, int tp, int rank,
                  bool attention, bool mlp, int64_t ffn, bool shared = false);
  void add_router(const ModelConfig& config, const std::string& name, BranchLayout& branch);
  void add_experts(const ModelConfig& config, int tp, int rank, ExpertPlace place, int64_t layer,
                   BranchLayout& branch);
};

/// Fills a flat array: matrices normal(0, 0.02), those that write to the residual stream scaled by
/// 1 / sqrt(2 * layers), norms 1. Each element depends on (seed, tensor name, position in the whole
/// tensor) alone.
void initialize_parameters(const ModelLayout& layout, const ModelConfig& config, uint64_t seed,
                           std::span<float> values);

}  // namespace tandem
