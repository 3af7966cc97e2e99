#include "engine/infer/decoder_parts.h"

#include <algorithm>

#include "kernels/elementwise.h"
#include "kernels/norm.h"

namespace tandem {

int64_t widest_in(const ModelLayout& layout) {
  int64_t maximum = 0;
  for (const BranchLayout& b : layout.branches) maximum = std::max(maximum, b.in.rows);
  return maximum;
}

int64_t widest_inner(const ModelLayout& layout) {
  int64_t maximum = 0;
  for (const BranchLayout& b : layout.branches) maximum = std::max(maximum, b.out.columns);
  return maximum;
}

std::vector<Wire> row_sum_wires(const DecoderContext& c) {
  std::vector<Wire> wires{c.codec.attention, c.codec.mlp, c.codec.embeddings};
  if (c.int8 && c.config.moe_layers() > 0) wires.push_back(c.codec.experts);
  return wires;
}

void multiply(const DecoderContext& c, const Tensor& x, const LayerWeight& weight,
              const Tensor& out) {
  if (c.int8) return c.int8->at(weight.matrix).multiply(x, out);
  gemm(c.exec, x, weight.values.transposed(), out, kWeightIsOld);
}

void Residuals::add_sum(const DecoderContext& c, bool later) {
  is_added = !later;
  if (is_added) add(c.exec, x, sum, x);
}

void Residuals::norm(const DecoderContext& c, const BranchLayout& b,
                     const program::Values& values) {
  const Tensor weight = c.view().norm(b);
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
