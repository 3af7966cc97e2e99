// Operands of training's GEMMs as e4m3 rows with a scale each (train.dtype = "fp8"), by current
// scaling: a scale is that of the row's largest element (tandem/quantize.h). A GEMM sums along the
// rows of both operands. So a weight is quantized twice, once a step: by rows for the forward pass,
// and by columns, transposed, for the gradient of the input. Activations and their gradients are
// quantized by rows before each GEMM. Weight gradients sum over tokens, so their operands are
// quantized by columns, or not at all (the recipes "rowwise" and "rowwise_with_gw_hp" of
// torchao.float8).
#pragma once

#include <map>
#include <optional>

#include "codec/quantize.h"
#include "engine/model/views.h"
#include "overlap/moe/quantization.h"

namespace tandem {

class QuantizedOperands {
 public:
  /// Memory for the weights of the layout's `in` and `out`, with `has_experts` also of the experts,
  /// and for x of up to `max_rows` rows, with `has_columns` also by columns. Without `has_scales`
  /// all scales are 1. Experts and no scales are for CPU ranks.
  QuantizedOperands(const Exec& exec, const ModelLayout& layout, int64_t max_rows, bool has_columns,
                    bool has_experts, bool has_scales);
  /// The next use of each weight quantizes it again.
  void weights_changed();
  /// `m`, whose values are bf16, by rows; if `is_transposed`, its transpose by rows.
  QuantizedRows weight(const WeightMatrix& m, const Tensor& values, bool is_transposed);
  /// `values` of the experts_in or experts_out at `offset`, by rows; if `is_transposed`, each
  /// expert's transpose.
  QuantizedRows experts(int64_t offset, const Tensor& values, bool is_transposed);
  /// x by rows, until the next call.
  QuantizedRows rows(const Tensor& x);
  /// gradient (+)= dy^T x, f32 or bf16 [columns of dy, columns of x], of both by columns. Ends the
  /// rows of another x. Only with has_columns.
  void write_weight_gradient(const Tensor& dy, const Tensor& x, const Tensor& gradient, bool adds);

 private:
  struct Weight {
    Weight(const Exec& exec, const WeightMatrix& m);
    Activation codes, scales;              // [rows, columns], [1, rows]
    Activation transposed, column_scales;  // [columns, rows], [1, columns]
    bool is_current = false;
  };
  /// Memory of a quantized x.
  struct Scratch {
    Scratch(const Exec& exec, const ModelLayout& layout, int64_t max_rows);
    QuantizedRows view(int64_t rows, int64_t columns) const;
    Activation codes, scales;
  };
  void quantize(const Tensor& x, const QuantizedRows& to) const;
  void quantize_by_columns(const Tensor& x, const QuantizedRows& to) const;

  Exec exec_;
  bool has_scales_;
  std::map<int64_t, Weight> weights_;  // by offset
  struct Experts {
    QuantizedExperts codes;
    bool is_current = false;
  };
  std::map<int64_t, Experts> experts_;  // by offset
  Scratch x_;
  std::optional<Scratch> dy_;  // by columns
};

/// Bytes of QuantizedOperands.
size_t quantized_bytes(const ModelLayout& layout, int64_t max_rows, bool has_columns,
                       bool has_experts);

}  // namespace tandem
