// Offsets of each weight of one rank's model shard in its flat arrays.
//
// The weights are those of a layer's branches (program/program.h). Weights of one GEMM form one
// fused matrix: `in` is [q | k | v | gate | up] by rows, `out` is [attention | MLP] by columns, and
// a gate of the shared expert is the row of `in` after those, before 7 rows of zeros; the Hugging
// Face tensors are row or column ranges of these. Vectors of an operation form one array. Order:
// embedding, the stage's layers, final norm, head. A tied head is the embedding. After them, this
// rank's experts, layer by layer: [gate | up] of each by rows, then the down projections, then the
// biases of [gate | up].
//
// A tied embedding whose ends are in two stages is a parameter of the stage with the head. The
// other one has a copy after all its parameters.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/model/config.h"
#include "engine/model/program/program.h"
#include "engine/model/stage.h"
#include "tandem/collectives.h"

namespace tandem {

/// Row-major matrix in the flat arrays.
struct WeightMatrix {
  int64_t offset = 0, rows = 0, columns = 0;
};

struct BranchLayout {
  program::BranchProgram program;
  std::vector<Shard> columns;    ///< of each value on this rank, within the value they are of
  std::vector<int64_t> offsets;  ///< of each weight; experts: -1
  bool attention = false, mlp = false, moe = false;
  int64_t begin = 0;  ///< first element of the branch, which begins with the norm before it
  WeightMatrix in, out;
  int64_t whole_rows = 0;  ///< last rows of `in`, which every rank has
  // MoE only; an MLP in the same branch is the shared expert.
  int moe_layer = -1;  ///< index among the MoE layers
  WeightMatrix router;
  int64_t router_bias = -1;              ///< offset; -1: none
  WeightMatrix experts_in, experts_out;  ///< [local experts x 2 ffn, hidden], [.. x hidden, ffn]
  WeightMatrix experts_bias;             ///< of experts_in: [local experts, 2 ffn], or no rows
  /// Whether `in` and `out` exist.
  bool has_products() const { return attention || mlp; }
  /// Whether the branch is an MLP without biases and nothing else.
  bool is_mlp() const { return mlp && !attention && !moe && !program.find(program::kColumnBias); }
  /// First element of an operation's weights.
  int64_t offset(const program::Op& op) const { return offsets[op.weights.front()]; }
  /// Whether a norm is before it.
  bool has_norm() const { return !program.ops.front().weights.empty(); }
};

/// Branches of a kind have the same shapes and share operators: attention (with or without an MLP
/// in parallel), MLP, MLP next to experts.
constexpr size_t kBranchKinds = 3;
inline size_t branch_kind(const BranchLayout& b) {
  return b.moe ? 2 : b.attention ? 0 : 1;
}

/// Wire format of the branch's sums over ranks.
inline const Wire& branch_wire(const CodecPolicy& policy, const BranchLayout& b) {
  return b.attention ? policy.attention : policy.mlp;
}
inline OverlapOptions with_wire(OverlapOptions options, const Wire& wire) {
  options.wire = wire;
  return options;
}

/// Options of an operator of `comm`. An axis of one rank has nothing to overlap and asks for
/// serial, or strict options would refuse it.
template <typename Options>
Options options_on(const Communicator& comm, Options options) {
  if (comm.size() == 1) options.strategy = Strategy::serial;
  return options;
}

/// Coordinates of a rank among the EP ranks that share the experts.
struct ExpertCoordinates {
  int ep = 1, rank = 0;
};

/// Part of a stage in a tied embedding whose two uses are in two stages.
enum class TiedEmbedding : uint8_t { none, owner, copy };

class ModelLayout {
 public:
  /// Throws ConfigError if `config` does not fit `tp`, `coordinates` and `layers`.
  ModelLayout(const ModelConfig& config, int tp, int rank, ExpertCoordinates coordinates = {},
              const StageLayers& layers = {});

  int64_t heads, kv_heads;     ///< on this rank; ranks share a key and value head if they are more
  int64_t q, kv;               ///< columns on this rank: heads * head_dim
  int64_t vocab_begin, vocab;  ///< this rank's rows of embedding and head
  WeightMatrix embedding, head;
  std::vector<BranchLayout> branches;
  int branches_per_layer;
  int64_t final_norm;
  int64_t experts_begin = 0;  ///< offset of the first expert parameter
  int64_t experts_end = 0;    ///< and that after the last one
  FlatRange experts() const { return {experts_begin, experts_end - experts_begin}; }
  TiedEmbedding tied = TiedEmbedding::none;
  int64_t size = 0;                   ///< elements of each flat array
  std::vector<Parameter> parameters;  ///< of the whole model

 private:
  /// Adds what `add` adds, on another stage only its parameters, as absent.
  template <typename Add>
  void add_if(bool is_here, const Add& add);
  int64_t reserve(int64_t elements);
  void add_branch(program::BranchProgram program, const std::string& layer, int tp, int rank);
  void assign_offsets(BranchLayout& branch, int tp, int rank);
  void add_experts(const ModelConfig& config, int tp, int rank, ExpertCoordinates coordinates,
                   int64_t layer, BranchLayout& branch);
};

/// Window of a stage's parameters [range.begin, range.end()) in the whole model's [whole_range…).
FlatWindow make_window(const ModelLayout& stage, FlatRange range, const ModelLayout& whole,
                       FlatRange whole_range);

}  // namespace tandem
