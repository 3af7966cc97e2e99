#include "engine/model/branch_attention.h"

#include <algorithm>
#include <map>
#include <vector>

#include "engine/model/branch.h"
#include "kernels/attention/sinks.h"
#include "observe/recorder.h"

namespace tandem {
namespace {

/// Windows, and how many branches have each, with or without rotation.
std::map<int64_t, int> attention_windows(const ModelLayout& layout, bool rotates) {
  std::map<int64_t, int> windows;
  for (const BranchLayout& branch : layout.branches) {
    const program::Op* const op = branch.program.find(program::kAttention);
    if (op && op->rotates == rotates) ++windows[op->window];
  }
  return windows;
}

std::unique_ptr<Attention> make_local(const ModelContext& c, const BranchLayout& l, bool rotates) {
  const AttentionShape shape{c.options.batch, c.options.seq, c.layout.heads, c.layout.kv_heads,
                             c.config.head_dim};
  std::vector<int64_t> windows;
  for (const auto& [window, branches] : attention_windows(c.layout, rotates)) {
    windows.push_back(window);
  }
  return std::make_unique<Attention>(
      c.exec, shape, c.rope.of(rotates),
      AttentionRows{c.options.dtype, l.in.rows, l.out.columns, c.options.deterministic, windows,
                    c.options.documents});
}

std::unique_ptr<ContextOperator> make_with_ranks(const ModelContext& c, bool rotates) {
  const ContextShape shape{.batch = c.options.batch,
                           .seq = c.options.seq,
                           .heads = c.layout.heads,
                           .kv_heads = c.layout.kv_heads,
                           .head_dim = c.config.head_dim,
                           .dtype = c.options.dtype,
                           .wire = c.options.codec.keys};
  const auto windows = attention_windows(c.layout, rotates);
  const auto usual = std::ranges::max_element(windows, {}, [](const auto& w) { return w.second; });
  return std::make_unique<ContextOperator>(
      *c.options.context, shape, &c.rope.of(rotates),
      ContextOptions{.strategy = c.options.overlap.strategy, .window = usual->first});
}

}  // namespace

BranchAttention::Form BranchAttention::make_form(const ModelContext& c, const BranchLayout& l,
                                                 bool rotates) {
  if (attention_windows(c.layout, rotates).empty()) return {};
  if (c.options.context) return {nullptr, make_with_ranks(c, rotates)};
  return {make_local(c, l, rotates), nullptr};
}

BranchAttention::BranchAttention(ModelContext& c, const BranchLayout& l)
    : context_(c), rotating_(make_form(c, l, true)), still_(make_form(c, l, false)) {}

Tensor BranchAttention::sinks(const BranchLayout& branch, const program::Op& op) const {
  if (op.weights.empty()) return {};
  return context_.weights.vector(branch.offset(op), context_.layout.heads);
}

void BranchAttention::forward(const ContextForward& c, const BranchLayout& branch,
                              const program::Op& op, bool again) {
  run(c, op.rotates, again);
  const Tensor sinks = this->sinks(branch, op);
  if (sinks.dims() > 0) add_sinks(context_.exec, sinks, c.out, c.log_sums);
}

void BranchAttention::backward(const ContextBackward& c, const BranchLayout& branch,
                               const program::Op& op) {
  run_backward(c, op.rotates);
  const Tensor sinks = this->sinks(branch, op);
  if (sinks.dims() == 0) return;
  const int64_t offset = branch.offset(op);
  const bool adds = context_.adds_gradient(offset);
  sinks_backward(context_.exec, sinks, c.out, c.log_sums, c.dout,
                 context_.gradients.at(offset, sinks.elements()), adds);
}

void BranchAttention::run(const ContextForward& c, bool rotates, bool again) {
  const auto& [local, with_ranks] = form(rotates);
  if (local && again) {
    return local->forward_again(context_.exec, c.q, c.k, c.v, c.out, c.log_sums, c.mask);
  }
  if (local) return local->forward(context_.exec, c.q, c.k, c.v, c.out, c.log_sums, c.mask);
  const ScopedPhase phase(Phase::cp_wait);
  if (const auto& pass = context_.options.context_passes.forward) return pass(*with_ranks, c);
  with_ranks->forward(c.q, c.k, c.v, c.out, c.log_sums, c.mask);
}

void BranchAttention::run_backward(const ContextBackward& c, bool rotates) {
  const auto& [local, with_ranks] = form(rotates);
  if (local) {
    return local->backward(context_.exec, c.q, c.k, c.v, c.out, c.log_sums, c.dout, c.dq, c.dk,
                           c.dv, c.mask);
  }
  const ScopedPhase phase(Phase::cp_wait);
  if (const auto& pass = context_.options.context_passes.backward) return pass(*with_ranks, c);
  with_ranks->backward(c.q, c.k, c.v, c.out, c.log_sums, c.dout, c.dq, c.dk, c.dv, c.mask);
}

}  // namespace tandem
