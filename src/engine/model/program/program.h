// A decoder layer as data: its values, its weights and the operations that compute them, in order.
// Parameters (layout.h), activation memory and FLOPs (cost.h), placements (declaration.h), passes
// (frame.h) and what GPUs refuse are read from it. make_layer (layer.cc) writes it down.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "engine/model/config.h"
#include "tandem/collectives.h"
#include "tandem/tensor.h"

namespace tandem {
struct BranchLayout;
struct LayerView;
}  // namespace tandem

namespace tandem::program {

/// Division of features among the TP ranks.
enum class Division : uint8_t {
  whole,    ///< every rank has all
  divided,  ///< units are divided among the ranks
  shared,   ///< divided; adjacent ranks have one unit if there are fewer units than ranks
};

/// Features of a value or a weight: `units` of `width` elements each, such as heads.
struct Features {
  int64_t units = 0, width = 1;
  Division division = Division::whole;

  int64_t count() const { return units * width; }
  /// A rank's shard of the features.
  Shard on_rank(int tp, int rank) const;
};

/// Rows of a value on a rank.
enum class Rows : uint8_t {
  local,  ///< the rank's rows of the residual stream
  all,    ///< all tokens of a microbatch
  one,    ///< one row
};

/// Memory of a value from a layer's forward to its backward pass (engine/model/recompute.h).
enum class Life : uint8_t {
  saved,       ///< also by a layer with selective recomputation
  recomputed,  ///< computed again by such a layer
  scratch,     ///< not beyond a pass
};

using ValueId = int;

struct Value {
  const char* name;
  Rows rows;
  Features columns;  ///< none: memory of the operation that writes it
  Life life;
  std::optional<DType> dtype = {};  ///< none: that of GEMMs
  /// Value whose columns these are, after those of its earlier ranges; -1: none, it has memory.
  ValueId range_of = -1;
  bool by_columns = false;  ///< in memory as [columns, rows]
};

/// Values of all branches with products. Of other branches only the first two are written.
constexpr ValueId kXNorm = 0, kInverseRms = 1, kHidden = 2, kInner = 3;
constexpr size_t kMaxValues = 24;
/// Tensors of a branch's values by number, without dimensions if there is none.
using Values = std::array<Tensor, kMaxValues>;

/// Named tensor of the layer. `rows`: output features, or the elements of a vector.
struct Weight {
  std::string name;  ///< after "model.layers.N."; "*" is the number of an expert
  Features rows, columns = {};
  float initial = 1;           ///< of a vector; matrices are random
  bool in_projection = false;  ///< row of the column-parallel GEMM's matrix, on every rank

  bool is_vector() const { return columns.units == 0; }
  int64_t elements() const { return rows.count() * (is_vector() ? 1 : columns.count()); }
  /// Name of an expert's.
  std::string name_of(int64_t expert) const;
};

/// Rotary embedding of a layer.
enum class Rotation : uint8_t {
  none,
  usual,  ///< rope_theta, scaled
  local,  ///< rope_local_theta
};
constexpr size_t kNumRotations = 3;

struct OpRow;

/// One operation of a branch, with the numbers of its operands, results and weights.
struct Op {
  const OpRow* row;
  std::vector<ValueId> in, out;
  std::vector<size_t> weights = {};     ///< attention: of its sinks, if it has them
  int64_t copies = 1;                   ///< sets of such weights: the experts
  int64_t window = 0;                   ///< sliding window of the attention; 0: none
  Rotation rotation = Rotation::usual;  ///< rotary embedding of attention's q and k
};

/// Residual branch: a norm, or the stream rounded; its operations and the additions to the stream.
struct BranchProgram {
  const char* name;  ///< "attention", "mlp" or "moe"
  std::vector<Value> values;
  std::vector<Weight> weights;  ///< in the order of the model's parameters
  std::vector<Op> ops;          ///< in order of execution

  ValueId add(const Value& value);
  /// nullptr if the branch has none.
  const Op* find(const OpRow& row) const;
  /// Whether operations change the sum of the row-parallel GEMM before it is added.
  bool finishes_sum() const;
  /// Whether their backward passes read values that they save.
  bool saves_sum() const;
  const Features& columns(ValueId value) const { return values[size_t(value)].columns; }
};

struct LayerProgram {
  std::vector<BranchProgram> branches;
};

/// Layer of a model, counted from 0.
LayerProgram make_layer(const ModelConfig& config, int64_t layer);

struct Frame;
struct BackwardFrame;
class Declaration;
struct Sizes;

/// Kind of an operation: one file of ops/.
struct OpRow {
  const char* name;
  /// Passes; without one, the frame's Runner has it.
  void (*forward)(const Op&, Frame&) = nullptr;
  void (*backward)(const Op&, BackwardFrame&) = nullptr;
  bool is_gemm = false;  ///< a later pass may compute the gradients of its weights
  /// Changes the complete sum of the row-parallel GEMM, this rank's rows, before it is added to the
  /// residual stream, and writes those of its results that have memory; `backward` then replaces
  /// frame.d_sum. Stands after the GEMM.
  void (*finish)(const Op&, const LayerView&, const BranchLayout&, const Values&,
                 const Tensor& sum) = nullptr;
  /// Declares its results, and the gradients of its operands and weights.
  void (*declare)(const Op&, Declaration&) = nullptr;
  void (*declare_backward)(const Op&, Declaration&) = nullptr;
  /// Twice the keys that a token reads in the mean, times the columns of its queries.
  double (*keys)(const BranchProgram&, const Op&, int64_t seq) = nullptr;
  /// Bytes of the values that are in its memory.
  double (*bytes)(const Sizes&) = nullptr;
  /// Why GPUs cannot run it on `tp` ranks, as "model.ffn = 100: expected a multiple of 8 on GPUs";
  /// empty if they can.
  std::string (*refusal)(const BranchProgram&, const Op&, const ModelConfig&, int64_t tp) = nullptr;
  /// Keys of a model that has it, as "model.residual_multiplier", if only CPU ranks run it.
  const char* cpu_only = nullptr;
  /// `cpu_only` of a model; nullptr: GPUs run it.
  const char* (*needs_cpu)(const ModelConfig&) = nullptr;
};

// In ops/NAME.cc.
extern const OpRow kRmsNorm, kRoundStream, kColumnGemm, kColumnBias, kQkNorm, kQkNormAllHeads,
    kAttention, kRotaryOrder, kSwiglu, kGateRows, kRowGemm, kSumBias, kSumNorm, kSumScale,
    kRouterBias, kRouter, kExpertBias, kExperts;

}  // namespace tandem::program
