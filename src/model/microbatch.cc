#include "model/microbatch.h"

#include "model/branch.h"

namespace tandem {

BranchActivations::BranchActivations(const ModelContext& c, const BranchLayout& l)
    : normed(c.options.dtype, c.own.count, c.config.hidden),
      hidden(c.options.dtype, c.tokens, l.in.rows),
      inner(c.options.dtype, c.tokens, l.out.columns),
      log_sums(DType::f32, l.attention ? c.options.batch * c.layout.heads : 0, c.options.seq),
      inverse_rms(DType::f32, 1, c.own.count) {}

MoeActivations::MoeActivations(const ModelContext& c, const BranchLayout& l)
    : normed(c.options.dtype, c.own.count, c.config.hidden),
      inverse_rms(DType::f32, 1, c.own.count),
      scores(DType::f32, c.own.count, c.config.experts),
      chosen(DType::i32, c.own.count, c.config.top_k),
      weights(DType::f32, c.own.count, c.config.top_k) {
  if (l.has_products()) shared.emplace(c, l);
}

HeadActivations::HeadActivations(const ModelContext& c)
    : normed(c.options.dtype, c.own.count, c.config.hidden),
      inverse_rms(DType::f32, 1, c.own.count),
      logits(DType::f32, c.tokens, c.layout.vocab),
      maxima(DType::f32, 1, c.tokens),
      sums(DType::f32, 2, c.tokens) {}

MicrobatchState::MicrobatchState(const ModelContext& c)
    : branches(c.layout.branches.size()), head(c) {
  for (size_t i = 0; i < branches.size(); ++i) {
    const BranchLayout& l = c.layout.branches[i];
    l.moe ? void(branches[i].moe.emplace(c, l)) : void(branches[i].dense.emplace(c, l));
  }
  for (size_t i = 0; i <= branches.size(); ++i) {
    residuals.emplace_back(DType::f32, c.own.count, c.config.hidden);
  }
}

}  // namespace tandem
