// Placements: the share of a tensor that ranks hold along each axis of parallelism, as DTensor's in
// PyTorch, and the rules by which operators consume and produce them. Tensors are declared and
// operators checked when a model is constructed (engine/model/stage_placements.h), not when it
// runs.
//
// Rules do not depend on the sizes of the axes, so a model on one rank is checked for all sizes of
// tp, cp, ep and expert_dp. Stages are declared as they are split over pp.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "engine/model/axes.h"
#include "engine/model/parameter.h"

namespace tandem {

/// Share of a tensor that each rank of one axis holds.
class Placement {
 public:
  enum class Kind : uint8_t {
    replicated,  ///< all of it, with the same values
    partial,     ///< a term each: the tensor is their sum
    sharded,     ///< a range of a dimension each
    one_rank,    ///< all of it on one rank, nothing on the others
  };

  constexpr Placement() = default;
  static constexpr Placement replicated() { return {}; }
  static constexpr Placement partial() { return {Kind::partial, 0}; }
  static constexpr Placement sharded(int dim) { return {Kind::sharded, dim}; }
  /// Sharded as elements of the flat arrays, whatever the tensor's dimensions.
  static constexpr Placement flat() { return {Kind::sharded, kFlat}; }
  static constexpr Placement on_rank(int rank) { return {Kind::one_rank, rank}; }

  constexpr Kind kind() const { return kind_; }
  /// Rank of the axis that holds the tensor; with one_rank only.
  constexpr int rank() const { return index_; }
  /// "replicated", "partial", "sharded(0)", "sharded(flat)" or "rank 2"
  std::string describe() const;
  constexpr bool operator==(const Placement&) const = default;

 private:
  static constexpr int kFlat = -1;
  constexpr Placement(Kind kind, int index) : kind_(kind), index_(index) {}

  Kind kind_ = Kind::replicated;
  int index_ = 0;  // dimension or rank
};

/// Name of an axis in messages.
const char* name_of(Axis axis);

/// Tensor by name, the operator that made it, and its placement over each axis.
struct PlacedTensor {
  std::string name;
  std::string made_by;
  std::array<Placement, kNumLearnerAxes> placements = {};

  Placement& over(Axis axis) { return placements[size_t(axis)]; }
  const Placement& over(Axis axis) const { return placements[size_t(axis)]; }
};

/// Tensors of a model in the order of their declaration. Names are unique.
class PlacementTable {
 public:
  PlacementTable() = default;
  PlacementTable(PlacementTable&&) = default;
  /// Returns the tensor. Throws std::logic_error if its name is declared already.
  const PlacedTensor& add(PlacedTensor tensor);
  /// Throws std::logic_error if there is none.
  const PlacedTensor& at(const std::string& name) const;
  const std::deque<PlacedTensor>& tensors() const { return tensors_; }

 private:
  std::deque<PlacedTensor> tensors_;
  std::map<std::string, const PlacedTensor*> by_name_;
};

/// Rules of operators: the result's placements from those of the operands. An operand that the
/// operator cannot consume throws std::logic_error, as an error of Tandem and not of its user:
/// "gemm_rs: hidden over tp: found replicated, expected sharded(1)". Dimension 0 of activations is
/// tokens, of weights output features.
namespace placement {

constexpr Placement kReplicated = Placement::replicated(), kPartial = Placement::partial(),
                    kRows = Placement::sharded(0), kColumns = Placement::sharded(1),
                    kFlat = Placement::flat();

using Operands = std::vector<PlacedTensor>;

/// Throws unless the tensor has this placement over the axis.
void expect(const char* op, const PlacedTensor& tensor, Axis axis, Placement expected);

// Communication along axes.
PlacedTensor all_gather(const PlacedTensor& x, Axes axes, Placement shards, std::string name);
PlacedTensor reduce_scatter(const PlacedTensor& x, Axes axes, Placement shards, std::string name);
PlacedTensor all_reduce(const PlacedTensor& x, Axes axes, std::string name);
/// From the rank of the axis that holds the tensor to another.
PlacedTensor send(const PlacedTensor& x, Axis axis, int rank, std::string name);

// Computation on each rank.
/// One of a tensor's copies along each axis; other ranks have 0.
PlacedTensor count_once(const PlacedTensor& x, Axes axes, std::string name);
/// Elements of a replicated tensor that a rank owns in the flat arrays.
PlacedTensor owned_shard(const PlacedTensor& x, Axes axes, std::string name);
PlacedTensor transposed(const PlacedTensor& matrix);
/// Matrix product a x b.
PlacedTensor gemm(const PlacedTensor& a, const PlacedTensor& b, std::string name);
/// a + b
PlacedTensor add(const PlacedTensor& a, const PlacedTensor& b, std::string name);
/// Matrices in one allocation.
PlacedTensor fuse(const Operands& matrices, std::string name);
/// Nonlinear function of each element.
PlacedTensor elementwise(const char* op, const Operands& operands, std::string name);
/// Nonlinear function of each row, and of `weights`, which every row reads.
PlacedTensor by_rows(const char* op, const Operands& operands, const Operands& weights,
                     std::string name);
/// Sum over rows of a nonlinear function of each.
PlacedTensor sum_of_rows(const char* op, const Operands& operands, std::string name);
/// Sums of a matrix's columns.
PlacedTensor column_sums(const PlacedTensor& x, std::string name);
PlacedTensor sum_of_squares(const PlacedTensor& x, std::string name);
/// Needs heads sharded over tp, and whole sequences on every rank of the other axes; but over cp
/// rows of them, whose keys and values ranks exchange.
PlacedTensor attention(const char* op, const Operands& operands, std::string name);
/// Rows of a table sharded over the vocabulary; 0 for tokens of other ranks.
PlacedTensor embedding(const PlacedTensor& tokens, const PlacedTensor& table, std::string name);
PlacedTensor embedding_gradient(const PlacedTensor& tokens, const PlacedTensor& dx,
                                const PlacedTensor& table, std::string name);

// Operators that also communicate, along tp and the experts also along ep.
/// all-gather(x) x weight^T
PlacedTensor ag_gemm(const PlacedTensor& x, const PlacedTensor& weight, std::string name);
/// reduce-scatter(x x weight^T)
PlacedTensor gemm_rs(const PlacedTensor& x, const PlacedTensor& weight, std::string name);
/// dy^T x all-gather(x)
PlacedTensor ag_wgrad(const PlacedTensor& x, const PlacedTensor& dy, std::string name);
/// Cross-entropy of logits sharded over the vocabulary, summed over rows, and its gradient.
PlacedTensor cross_entropy(const PlacedTensor& logits, const PlacedTensor& targets,
                           std::string name);
PlacedTensor cross_entropy_backward(const PlacedTensor& logits, const PlacedTensor& targets,
                                    std::string name);
/// Matrices of all experts, sharded over ep, from those of each, or of one from those of all.
PlacedTensor fuse_experts(const Operands& experts, std::string name);
PlacedTensor one_expert(const PlacedTensor& all, int ep_rank, std::string name);
/// Outputs of the experts of every row. `rows`: tensors with a row per token, among them the
/// routing.
PlacedTensor experts(const char* op, const Operands& rows, const PlacedTensor& w_in,
                     const PlacedTensor& w_out, std::string name);
/// Gradient of one of their two matrices.
PlacedTensor experts_gradient(const Operands& rows, const PlacedTensor& weight, std::string name);

// Optimizer.
/// Gradient of `parameter` summed over its copies, the ranks of the axes, each of which then has
/// those elements that it updates. Over other axes it must be as the parameter is.
PlacedTensor gradient_sync(const PlacedTensor& gradient, const PlacedTensor& parameter, Axes axes,
                           std::string name);
/// Updated elements gathered to be as the parameter is. `norm`: of the whole gradient.
PlacedTensor update(const PlacedTensor& gradient, const PlacedTensor& parameter,
                    const PlacedTensor& norm, Axes axes, std::string name);

}  // namespace placement
}  // namespace tandem
