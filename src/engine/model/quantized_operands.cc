#include "engine/model/quantized_operands.h"

#include <algorithm>
#include <utility>

#include "gemm/quantized_gemm.h"

namespace tandem {
namespace {

int64_t max_columns(const ModelLayout& layout) {
  int64_t columns = 0;
  for (const BranchLayout& branch : layout.branches) {
    for (const WeightMatrix& m : {branch.in, branch.out}) {
      columns = std::max({columns, m.rows, m.columns});
    }
  }
  return columns;
}

/// Local experts of a branch that has some.
int64_t experts_of(const BranchLayout& branch) {
  return branch.experts_out.rows / branch.experts_in.columns;
}

Tensor vector_of(const Activation& row) {
  return Tensor(row->data(), DType::f32, {row->elements()}, row->device());
}

}  // namespace

QuantizedOperands::Weight::Weight(const Exec& exec, const WeightMatrix& m)
    : codes(DType::e4m3, m.rows, m.columns, exec.device),
      scales(DType::f32, 1, m.rows, exec.device),
      transposed(DType::e4m3, m.columns, m.rows, exec.device),
      column_scales(DType::f32, 1, m.columns, exec.device) {}

QuantizedOperands::Scratch::Scratch(const Exec& exec, const ModelLayout& layout, int64_t max_rows)
    : codes(DType::e4m3, max_rows, max_columns(layout), exec.device),
      scales(DType::f32, 1, std::max(max_rows, max_columns(layout)), exec.device) {}

QuantizedRows QuantizedOperands::Scratch::view(int64_t rows, int64_t columns) const {
  return {Tensor(codes->data(), DType::e4m3, {rows, columns}, codes->device()),
          vector_of(scales).narrow(0, 0, rows)};
}

QuantizedOperands::QuantizedOperands(const Exec& exec, const ModelLayout& layout, int64_t max_rows,
                                     bool has_columns, bool has_experts, bool has_scales)
    : exec_(exec), has_scales_(has_scales), x_(exec, layout, max_rows) {
  if (has_columns) dy_.emplace(exec, layout, max_rows);
  for (const BranchLayout& branch : layout.branches) {
    if (branch.moe && has_experts) {
      const int64_t experts = experts_of(branch);
      for (const WeightMatrix& m : {branch.experts_in, branch.experts_out}) {
        experts_.try_emplace(m.offset, Experts{{experts, m.rows / experts, m.columns}});
      }
    }
    if (!branch.has_products()) continue;
    for (const WeightMatrix& m : {branch.in, branch.out}) {
      weights_.try_emplace(m.offset, exec, m);
    }
  }
}

void QuantizedOperands::weights_changed() {
  for (auto& [offset, weight] : weights_) weight.is_current = false;
  for (auto& [offset, experts] : experts_) experts.is_current = false;
}

void QuantizedOperands::quantize(const Tensor& x, const QuantizedRows& to) const {
  if (!has_scales_) return round_rows_on_cpu(x, to.codes, to.scales);
  quantize_rows(exec_, x, to.codes, to.scales);
}

void QuantizedOperands::quantize_by_columns(const Tensor& x, const QuantizedRows& to) const {
  if (!has_scales_) return round_rows_on_cpu(x.transposed(), to.codes, to.scales);
  quantize_columns(exec_, x, to.codes, to.scales);
}

QuantizedRows QuantizedOperands::weight(const WeightMatrix& m, const Tensor& values,
                                        bool is_transposed) {
  Weight& weight = weights_.at(m.offset);
  const QuantizedRows rows{weight.codes, vector_of(weight.scales)},
      columns{weight.transposed, vector_of(weight.column_scales)};
  if (!std::exchange(weight.is_current, true)) {
    quantize(values, rows);
    quantize_by_columns(values, columns);
  }
  return is_transposed ? columns : rows;
}

QuantizedRows QuantizedOperands::experts(int64_t offset, const Tensor& values, bool is_transposed) {
  auto& [codes, is_current] = experts_.at(offset);
  if (!std::exchange(is_current, true)) codes.quantize(values, has_scales_);
  return codes.rows(is_transposed);
}

QuantizedRows QuantizedOperands::rows(const Tensor& x) {
  const QuantizedRows rows = x_.view(x.dim(0), x.dim(1));
  quantize(x, rows);
  return rows;
}

void QuantizedOperands::write_weight_gradient(const Tensor& dy, const Tensor& x,
                                              const Tensor& gradient, bool adds) {
  const QuantizedRows by_output = dy_->view(dy.dim(1), dy.dim(0)),
                      by_input = x_.view(x.dim(1), x.dim(0));
  quantize_by_columns(dy, by_output);
  quantize_by_columns(x, by_input);
  gemm(exec_, by_output, by_input, gradient, adds);
}

size_t quantized_bytes(const ModelLayout& layout, int64_t max_rows, bool has_columns,
                       bool has_experts) {
  int64_t bytes = (has_columns ? 2 : 1) * max_rows * (max_columns(layout) + 4);
  for (const BranchLayout& branch : layout.branches) {
    for (const WeightMatrix& m : {branch.in, branch.out}) {
      bytes += 2 * m.rows * m.columns + 4 * (m.rows + m.columns);
    }
    if (!branch.moe || !has_experts) continue;
    const int64_t experts = experts_of(branch);
    for (const WeightMatrix& m : {branch.experts_in, branch.experts_out}) {
      bytes += int64_t(quantized_experts_bytes(experts, m.rows / experts, m.columns));
    }
  }
  return size_t(bytes);
}

}  // namespace tandem
