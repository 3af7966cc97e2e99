// Where each weight of one rank's share of the model stands in its flat arrays.
//
// A decoder layer is a list of branches, each norm -> column-parallel product -> heads and / or
// SwiGLU -> row-parallel product -> residual add: attention then MLP, or both at once in a parallel
// block. What one product reads is one fused matrix: `in` is [q | k | v | gate | up] by rows, `out`
// is [attention | MLP] by columns; the Hugging Face tensors are row or column ranges of these.
// Order: embedding, layers, final norm, head. A tied head is the embedding.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "model/config.h"
#include "model/transformer.h"

namespace tandem {

/// A row-major matrix in the flat arrays.
struct WeightMatrix {
  int64_t offset = 0, rows = 0, columns = 0;
};

struct BranchLayout {
  bool attention = false, mlp = false;
  int64_t begin = 0;  ///< of the branch's first element; its norm stands here
  WeightMatrix in, out;
};

class ModelLayout {
 public:
  /// Throws ConfigError when `config` does not fit `tp`.
  ModelLayout(const ModelConfig& config, int tp, int rank);

  int64_t heads, kv_heads;     ///< of this rank
  int64_t q, kv, ffn;          ///< columns of this rank: heads * head_dim, ..., SwiGLU width
  int64_t vocab_begin, vocab;  ///< this rank's rows of embedding and head
  WeightMatrix embedding, head;
  std::vector<BranchLayout> branches;
  int branches_per_layer;
  int64_t final_norm;
  int64_t size = 0;  ///< elements of each flat array
  std::vector<Parameter> parameters;

 private:
  int64_t reserve(int64_t elements);
  void add_norm(const std::string& name, int64_t hidden);
  void add_branch(const ModelConfig& config, const std::string& layer, int tp, int rank,
                  bool attention, bool mlp);
};

/// Fills a flat array: matrices normal(0, 0.02), those that write to the residual stream scaled by
/// 1 / sqrt(2 * layers), norms 1. Each element depends on (seed, tensor name, position in the whole
/// tensor) alone.
void initialize_parameters(const ModelLayout& layout, const ModelConfig& config, uint64_t seed,
                           std::span<float> values);

}  // namespace tandem
