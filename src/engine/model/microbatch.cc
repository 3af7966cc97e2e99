#include "engine/model/microbatch.h"

#include "engine/model/branch.h"

namespace tandem {

ProductActivations::ProductActivations(const ModelContext& c, const BranchLayout& l)
    : hidden(c.options.dtype, c.tokens, l.in.rows),
      inner(c.options.dtype, c.tokens, l.out.columns),
      log_sums(DType::f32, l.attention ? c.options.batch * c.layout.heads : 0, c.options.seq) {}

RoutedActivations::RoutedActivations(const ModelContext& c)
    : scores(DType::f32, c.own.count, c.config.experts),
      chosen(DType::i32, c.own.count, c.config.top_k),
      weights(DType::f32, c.own.count, c.config.top_k) {}

BranchActivations::BranchActivations(const ModelContext& c, const BranchLayout& l)
    : x_norm(c.options.dtype, c.own.count, c.config.hidden),
      inverse_rms(DType::f32, 1, c.own.count) {
  if (l.has_products()) products.emplace(c, l);
  if (l.moe) routed.emplace(c);
}

HeadActivations::HeadActivations(const ModelContext& c)
    : x_norm(c.options.dtype, c.own.count, c.config.hidden),
      inverse_rms(DType::f32, 1, c.own.count),
      logits(DType::f32, c.tokens, c.layout.vocab),
      maxima(DType::f32, 1, c.tokens),
      sums(DType::f32, 2, c.tokens) {}

MicrobatchState::MicrobatchState(const ModelContext& c) : head(c) {
  for (const BranchLayout& l : c.layout.branches) branches.emplace_back(c, l);
  for (size_t i = 0; i <= branches.size(); ++i) {
    residuals.emplace_back(DType::f32, c.own.count, c.config.hidden);
  }
}

}  // namespace tandem
