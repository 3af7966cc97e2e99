#include "engine/model/views.h"

namespace tandem {

HiddenViews split_hidden(const ModelLayout& l, const BranchLayout& branch, const Tensor& t) {
  HiddenViews h;
  if (branch.attention) {
    h.q = columns(t, 0, l.q);
    h.k = columns(t, l.q, l.kv);
    h.v = columns(t, l.q + l.kv, l.kv);
    h.qkv = columns(t, 0, l.q + 2 * l.kv);
  }
  if (branch.mlp) {
    const int64_t begin = branch.in.rows - 2 * branch.ffn - (branch.has_shared_gate ? 1 : 0);
    h.gate = columns(t, begin, branch.ffn);
    h.up = columns(t, begin + branch.ffn, branch.ffn);
    if (branch.has_shared_gate) h.shared_gate = columns(t, branch.in.rows - 1, 1);
  }
  return h;
}

UnnormalizedViews split_unnormalized(const ModelLayout& l, const Tensor& t) {
  if (t.dims() == 0) return {};
  return {columns(t, 0, l.q), columns(t, l.q, l.kv)};
}

InnerViews split_inner(const ModelLayout& l, const BranchLayout& branch, const Tensor& t) {
  InnerViews inner;
  if (branch.attention) inner.attention = columns(t, 0, l.q);
  if (branch.mlp) inner.mlp = columns(t, branch.out.columns - branch.ffn, branch.ffn);
  return inner;
}

}  // namespace tandem
