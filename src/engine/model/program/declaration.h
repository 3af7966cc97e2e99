// Placements of a branch's tensors, which its operations declare.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "engine/model/placement.h"
#include "engine/model/program/program.h"

namespace tandem {

/// Name of the gradient of a tensor.
std::string gradient_name(const std::string& tensor);

namespace program {

/// Declares a branch's tensors in a table, in the order of its operations. Throws std::logic_error
/// if one cannot consume an operand.
class Declaration {
 public:
  /// `layer`: "layers.0."
  Declaration(const ModelConfig& model, const BranchProgram& list, const std::string& layer,
              int pp_rank, PlacementTable& table)
      : config(model), program(list), layer_(layer), pp_rank_(pp_rank), table_(table) {}

  /// Replaces `x`, the residual stream before the branch, by that after it.
  void forward(PlacedTensor& x);
  /// Replaces `dx`, the gradient of the stream after the branch, by that before it.
  void backward(PlacedTensor& dx);

  /// Name of a tensor of the branch, "layers.0.attention.NAME".
  std::string name(const std::string& tensor) const { return layer_ + program.name + "." + tensor; }
  /// "model.layers.0."
  std::string layer() const { return "model." + layer_; }
  /// Name of an operation's parameter.
  std::string parameter(const Op& op, size_t i = 0) const;
  /// Matrices of an operation in one.
  PlacedTensor matrix(const Op& op, const std::string& tensor) const;
  const PlacedTensor& at(const std::string& tensor) const { return table_.at(tensor); }
  const PlacedTensor& add(PlacedTensor tensor) { return table_.add(std::move(tensor)); }
  void add(const placement::Operands& tensors);
  /// Gradients of an operation's parameters, which are ranges of `gradient`.
  placement::Operands gradients_of(const Op& op, PlacedTensor gradient) const;
  /// Gradient of which every rank has a term, and before it that term.
  placement::Operands summed(const PlacedTensor& term, const std::string& parameter) const;
  /// Declares gradients after those of the column-parallel GEMM's matrix.
  void add_between(const placement::Operands& tensors) {
    between.insert(between.begin(), tensors.begin(), tensors.end());
  }
  /// Tensor of one value on all ranks, or a shard of it.
  PlacedTensor constant(const char* tensor, Placement over_tp) const;

  const ModelConfig& config;
  const BranchProgram& program;
  PlacedTensor x, dx;  ///< residual stream, and its gradient
  /// Sum of the row-parallel GEMM, which operations change, and its gradient.
  PlacedTensor sum, d_sum;
  PlacedTensor input;  ///< x before the branch
  std::map<ValueId, PlacedTensor> values, gradients;
  placement::Operands inner;                   ///< columns of kInner
  placement::Operands d_x_norm;                ///< gradients of kXNorm
  placement::Operands between;                 ///< gradients of operations between the GEMMs
  std::map<std::string, PlacedTensor> others;  ///< between two operations

 private:
  const std::string layer_;
  int pp_rank_;
  PlacementTable& table_;
};

}  // namespace program
}  // namespace tandem
