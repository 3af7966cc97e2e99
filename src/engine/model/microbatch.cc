#include "engine/model/microbatch.h"

#include <utility>

#include "engine/model/branch.h"
#include "engine/model/stage.h"

namespace tandem {

WeightPass::WeightPass(const ModelContext& c, const BranchLayout& l)
    : dy(c.make(c.options.dtype, c.tokens, c.config.hidden)),
      dhidden(c.make(c.options.dtype, c.tokens, l.in.rows)) {}

ProductActivations::ProductActivations(const ModelContext& c, const BranchLayout& l)
    : hidden(c.make(c.options.dtype, c.tokens, l.in.rows)),
      inner(c.make(c.options.dtype, c.tokens, l.out.columns)),
      log_sums(
          c.make(DType::f32, l.attention ? c.options.batch * c.layout.heads : 0, c.options.seq)) {}

RoutedActivations::RoutedActivations(const ModelContext& c)
    : scores(c.make(DType::f32, c.local_rows.count, c.config.experts)),
      chosen(c.make(DType::i32, c.local_rows.count, c.config.top_k)),
      weights(c.make(DType::f32, c.local_rows.count, c.config.top_k)) {}

BranchActivations::BranchActivations(const ModelContext& c, const BranchLayout& l)
    : x_norm(c.make(c.options.dtype, c.local_rows.count, c.config.hidden)),
      inverse_rms(c.make(DType::f32, 1, c.local_rows.count)) {
  if (l.has_products()) products.emplace(c, l);
  if (l.moe) routed.emplace(c);
}

HeadActivations::HeadActivations(const ModelContext& c)
    : x_norm(c.make(c.options.dtype, c.local_rows.count, c.config.hidden)),
      inverse_rms(c.make(DType::f32, 1, c.local_rows.count)),
      logits(c.make(c.logits_dtype(), c.tokens, c.layout.vocab)),
      maxima(c.make(DType::f32, 1, c.tokens)),
      sums(c.make(DType::f32, 2, c.tokens)) {
  if (c.layout.tied == TiedEmbedding::none || c.exec.on_gpu()) return;
  dlogits.emplace(c.make(c.options.dtype, c.tokens, c.layout.vocab));
}

MicrobatchState::MicrobatchState(const ModelContext& c, bool owns_input)
    : tokens(c.make(DType::i32, 1, c.tokens)),
      targets(c.make(DType::i32, 1, c.tokens)),
      token_upload(c.exec, tokens->bytes()),
      target_upload(c.exec, targets->bytes()) {
  if (c.layers.head) head.emplace(c);
  for (const BranchLayout& l : c.layout.branches) branches.emplace_back(c, l);
  residuals.resize(branches.size() + 1);
  for (size_t i = owns_input ? 0 : 1; i < residuals.size(); ++i) {
    residuals[i] =
        *residual_memory.emplace_back(c.make(DType::f32, c.local_rows.count, c.config.hidden));
  }
}

void MicrobatchState::split_backward(const ModelContext& c) {
  for (size_t i = 0; i < branches.size(); ++i) {
    auto& products = branches[i].products;
    if (products && !products->weight_pass) products->weight_pass.emplace(c, c.layout.branches[i]);
  }
}

Microbatch::Microbatch(std::unique_ptr<MicrobatchState> state) : state_(std::move(state)) {}
Microbatch::~Microbatch() = default;
Microbatch::Microbatch(Microbatch&&) noexcept = default;
Microbatch& Microbatch::operator=(Microbatch&&) noexcept = default;

}  // namespace tandem
