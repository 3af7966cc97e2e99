#include "engine/infer/decoder_context.h"

#include <algorithm>

#include "kernels/elementwise.h"
#include "kernels/norm.h"

namespace tandem {

namespace {

/// Max columns over the branches of the `in` GEMM's output.
int64_t widest_in(const ModelLayout& layout) {
  int64_t maximum = 0;
  for (const BranchLayout& b : layout.branches) maximum = std::max(maximum, b.in.rows);
  return maximum;
}

/// Max columns of the `out` GEMM's input.
int64_t widest_inner(const ModelLayout& layout) {
  int64_t maximum = 0;
  for (const BranchLayout& b : layout.branches) maximum = std::max(maximum, b.out.columns);
  return maximum;
}

}  // namespace

const DecoderForms& device_forms(const Exec& exec) {
  static constexpr DecoderForms kHost{true, true, false, true}, kGpu{false, false, true, false};
  return exec.on_gpu() ? kGpu : kHost;
}

StepMemory::StepMemory(const DecoderContext& c, int64_t rows)
    : x(c.f32(rows, c.config.hidden)),
      inverse_rms(c.f32(1, rows)),
      x_norm(c.activation(rows, c.config.hidden)),
      hidden(c.activation(rows, widest_in(c.layout))),
      inner(c.activation(rows, widest_inner(c.layout))),
      sum(c.activation(rows, c.config.hidden)) {}

program::Values branch_values(const BranchLayout& b, const StepMemory& memory, int64_t local,
                              int64_t gemm_rows) {
  program::Values values{memory.x_norm->rows(0, local), memory.inverse_rms,
                         reshaped(memory.hidden, gemm_rows, b.in.rows),
                         reshaped(memory.inner, gemm_rows, b.out.columns)};
  program::set_ranges(b, values);
  return values;
}

std::vector<Wire> row_sum_wires(const DecoderContext& c) {
  std::vector<Wire> wires{c.codec.attention, c.codec.mlp, c.codec.embeddings};
  if (c.coded && c.has_experts()) wires.push_back(c.codec.experts);
  return wires;
}

void multiply(const DecoderContext& c, const Tensor& x, const LayerWeight& weight,
              const Tensor& out, SameBits same_bits, bool accumulate) {
  if (c.coded) return c.coded->multiply(weight.matrix, x, out, same_bits, accumulate);
  GemmOptions options = kWeightIsOld;
  options.accumulate = accumulate;
  options.same_bits = same_bits;
  gemm(c.exec, x, weight.values.transposed(), out, options);
}

bool multiply_swiglu(const DecoderContext& c, const Tensor& x, const LayerWeight& weight,
                     const Tensor& out, SameBits same_bits) {
  if (c.coded) return c.coded->multiply_swiglu(weight.matrix, x, out, same_bits);
  return gemm_swiglu(c.exec, x, weight.values, out, same_bits);
}

Tensor operand(const DecoderContext& c, const LayerWeight& weight) {
  return c.coded ? c.coded->rounded(weight.matrix) : weight.values;
}

void Residuals::add_sum(const DecoderContext& c, bool later) {
  is_added = !later;
  if (is_added) add(c.exec, x, sum, x);
}

void Residuals::norm(const DecoderContext& c, const BranchLayout& b,
                     const program::Values& values) {
  const NormWeight weight = c.view().norm(b);
  const Tensor &x_norm = values[program::kXNorm], &inverse_rms = values[program::kInverseRms];
  const double eps = c.config.stream_eps();
  if (is_added) {
    return rms_norm_forward(c.exec, x, weight, eps, x_norm, inverse_rms);
  }
  add_rms_norm_forward(c.exec, x, sum, weight, eps, x, x_norm, inverse_rms);
  is_added = true;
}

void Residuals::finish(const DecoderContext& c) {
  if (!is_added) add_sum(c, false);
}

}  // namespace tandem
