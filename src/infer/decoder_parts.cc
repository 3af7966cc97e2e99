#include "infer/decoder_parts.h"

#include <algorithm>

#include "kernels/norm.h"
#include "kernels/swiglu.h"

namespace tandem {

int64_t widest_in(const ModelLayout& layout) {
  int64_t most = 0;
  for (const BranchLayout& b : layout.branches) most = std::max(most, b.in.rows);
  return most;
}

int64_t widest_inner(const ModelLayout& layout) {
  int64_t most = 0;
  for (const BranchLayout& b : layout.branches) most = std::max(most, b.out.columns);
  return most;
}

void run_inner(const DecoderContext& c, size_t branch, const Tensor& hidden, int64_t position,
               int64_t count, const Tensor& inner) {
  const BranchLayout& b = c.layout.branches[branch];
  const HiddenViews h = split_hidden(c.layout, b, hidden);
  const InnerViews parts = split_inner(c.layout, b, inner);
  if (b.attention) c.caches[branch]->run(h.q, h.k, h.v, position, count, parts.attention);
  if (b.mlp) swiglu_forward(h.gate, h.up, parts.mlp);
}

void run_norm(const DecoderContext& c, const BranchLayout& b, const Tensor& x, float* inverse_rms,
              const Tensor& out) {
  rms_norm_forward(x, c.weights.norm(b.begin, c.config.hidden), c.config.norm_eps, out,
                   {inverse_rms, size_t(x.dim(0))});
}

}  // namespace tandem
