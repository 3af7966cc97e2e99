#include "engine/model/branch_attention.h"

#include <algorithm>
#include <map>
#include <vector>

#include "engine/model/branch.h"
#include "observe/recorder.h"

namespace tandem {
namespace {

/// Windows, and how many branches have each.
std::map<int64_t, int> attention_windows(const ModelLayout& layout) {
  std::map<int64_t, int> windows;
  for (const BranchLayout& branch : layout.branches) {
    if (const program::Op* op = branch.program.find(program::kAttention)) ++windows[op->window];
  }
  return windows;
}

std::unique_ptr<Attention> make_local(const ModelContext& c, const BranchLayout& l) {
  const AttentionShape shape{c.options.batch, c.options.seq, c.layout.heads, c.layout.kv_heads,
                             c.config.head_dim};
  std::vector<int64_t> windows;
  for (const auto& [window, branches] : attention_windows(c.layout)) windows.push_back(window);
  return std::make_unique<Attention>(
      c.exec, shape, c.rope,
      AttentionRows{c.options.dtype, l.in.rows, l.out.columns, c.options.deterministic, windows,
                    c.options.documents});
}

std::unique_ptr<ContextOperator> make_with_ranks(const ModelContext& c) {
  const ContextShape shape{.batch = c.options.batch,
                           .seq = c.options.seq,
                           .heads = c.layout.heads,
                           .kv_heads = c.layout.kv_heads,
                           .head_dim = c.config.head_dim,
                           .dtype = c.options.dtype,
                           .wire = c.options.codec.keys};
  const auto windows = attention_windows(c.layout);
  const auto usual = std::ranges::max_element(windows, {}, [](const auto& w) { return w.second; });
  return std::make_unique<ContextOperator>(
      *c.options.context, shape, &c.rope,
      ContextOptions{.strategy = c.options.overlap.strategy, .window = usual->first});
}

}  // namespace

BranchAttention::BranchAttention(ModelContext& c, const BranchLayout& l)
    : context_(c),
      local_(c.options.context ? nullptr : make_local(c, l)),
      with_ranks_(c.options.context ? make_with_ranks(c) : nullptr) {}

void BranchAttention::forward(const ContextForward& c, bool again) {
  if (local_ && again) {
    return local_->forward_again(context_.exec, c.q, c.k, c.v, c.out, c.log_sums, c.mask);
  }
  if (local_) return local_->forward(context_.exec, c.q, c.k, c.v, c.out, c.log_sums, c.mask);
  const ScopedPhase phase(Phase::cp_wait);
  if (const auto& pass = context_.options.context_passes.forward) return pass(*with_ranks_, c);
  with_ranks_->forward(c.q, c.k, c.v, c.out, c.log_sums, c.mask);
}

void BranchAttention::backward(const ContextBackward& c) {
  if (local_) {
    return local_->backward(context_.exec, c.q, c.k, c.v, c.out, c.log_sums, c.dout, c.dq, c.dk,
                            c.dv, c.mask);
  }
  const ScopedPhase phase(Phase::cp_wait);
  if (const auto& pass = context_.options.context_passes.backward) return pass(*with_ranks_, c);
  with_ranks_->backward(c.q, c.k, c.v, c.out, c.log_sums, c.dout, c.dq, c.dk, c.dv, c.mask);
}

}  // namespace tandem
