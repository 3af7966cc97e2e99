// GEMM of a branch and a weight in training: an AgGemm or GemmRs whose operands have the model's
// dtype or, with TransformerOptions::fp8, are quantized to e4m3 rows (quantized_operands.h).
#pragma once

#include <optional>

#include "engine/model/quantized_operands.h"
#include "tandem/overlap.h"

namespace tandem {

struct ModelContext;

/// Construction and runs are collective.
template <typename Operator>
class BranchGemm {
 public:
  using Shape = typename Operator::Shape;
  /// `shape`: in the model's dtype. With weight_kn the weight is read transposed.
  BranchGemm(ModelContext& context, const Shape& shape, const OverlapOptions& options);
  /// Operands as Operator::run takes them, but for the weight, which is `m` of the model. x must
  /// stay valid until the last call of gathered().
  void run(const Tensor& x, const WeightMatrix& m, const Tensor& out);
  /// Rows of all ranks of the last run's x, in the model's dtype; only with keep_gathered.
  /// Collective.
  Tensor gathered();

 private:
  void multiply_values(const QuantizedRows& x, const QuantizedRows& weight, const Tensor& out);

  ModelContext& context_;
  Shape shape_;
  Operator operator_;
  Tensor x_;                            // of the last run, if quantized
  std::optional<Activation> gathered_;  // if quantized, of several ranks
};

extern template class BranchGemm<AgGemm>;
extern template class BranchGemm<GemmRs>;

}  // namespace tandem
