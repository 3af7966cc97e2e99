#include "engine/model/head.h"

#include <algorithm>

#include "kernels/cross_entropy.h"
#include "kernels/elementwise.h"
#include "kernels/embedding.h"
#include "kernels/norm.h"
#include "tandem/collectives.h"

namespace tandem {

Embedding::Embedding(ModelContext& c)
    : context_(c),
      looked_up_(c.options.dtype, c.tokens, c.config.hidden),
      shard_(c.options.dtype, c.own.count, c.config.hidden) {}

void Embedding::forward(std::span<const int32_t> tokens, const Tensor& x) {
  embedding_forward(tokens, context_.weights.matrix(context_.layout.embedding),
                    context_.layout.vocab_begin, looked_up_);
  const bool narrow = x.dtype() != shard_->dtype();
  reduce_scatter(context_.tp, looked_up_, narrow ? *shard_ : x,
                 context_.options.codec.embeddings);  // one term is nonzero: exact without a codec
  if (narrow) cast(shard_, x);
}

void Embedding::backward(std::span<const int32_t> tokens, const Tensor& dx) {
  const bool narrow = dx.dtype() != shard_->dtype();
  if (narrow) cast(dx, shard_);
  all_gather(context_.tp, narrow ? *shard_ : dx, looked_up_);
  embedding_backward(tokens, looked_up_, context_.layout.vocab_begin,
                     context_.gradient(context_.layout.embedding));
}

Head::Head(ModelContext& c)
    : context_(c),
      product_(c.tp, {c.tokens, c.layout.vocab, c.config.hidden, c.options.dtype},
               with_wire(c.options.overlap, c.options.codec.embeddings)),
      dgrad_(c.tp,
             {.m = c.tokens,
              .n = c.config.hidden,
              .k = c.layout.vocab,
              .dtype = c.options.dtype,
              .weight_kn = true},
             c.options.overlap),
      wgrad_(c.tp, {c.tokens, c.layout.vocab, c.config.hidden, c.options.dtype}, c.options.overlap),
      dlogits_(c.options.dtype, c.tokens, c.layout.vocab),
      dnormed_(c.options.dtype, c.own.count, c.config.hidden) {}

std::span<const float> Head::norm_weight() const {
  return context_.weights.norm(context_.layout.final_norm, context_.config.hidden);
}

double Head::forward(const Tensor& x, std::span<const int32_t> targets, HeadActivations& saved) {
  rms_norm_forward(x, norm_weight(), context_.config.norm_eps, saved.x_norm,
                   {saved.inverse_rms->as<float>(), size_t(context_.own.count)});
  product_.run(saved.x_norm, context_.weights.matrix(context_.layout.head), saved.logits);
  const std::span<float> maxima = per_token(saved.maxima), sums = per_token(saved.sums),
                         picked = per_token(saved.sums, 1);
  cross_entropy_max(saved.logits, maxima);
  all_reduce(context_.tp, saved.maxima, ReduceOp::max);
  cross_entropy_sum(saved.logits, targets, context_.layout.vocab_begin, maxima, sums, picked);
  all_reduce(context_.tp, saved.sums);
  return cross_entropy_loss(targets, sums, picked);
}

void Head::backward(const Tensor& x, std::span<const int32_t> targets, float scale,
                    const HeadActivations& saved, const Tensor& dx, std::span<float> dnorm) {
  const ModelLayout& layout = context_.layout;
  cross_entropy_backward(saved.logits, targets, layout.vocab_begin, per_token(saved.maxima),
                         per_token(saved.sums), scale, dlogits_);
  dgrad_.run(dlogits_, context_.weights.matrix(layout.head).transposed(), dnormed_);
  wgrad_.run(saved.x_norm, dlogits_, context_.gradient(layout.head));
  std::fill_n(dx.as<float>(), dx.elements(), 0.0f);
  rms_norm_backward(x, norm_weight(), {saved.inverse_rms->as<float>(), size_t(context_.own.count)},
                    dnormed_, dx, dnorm);
}

}  // namespace tandem
