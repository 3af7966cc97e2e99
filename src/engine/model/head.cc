#include "engine/model/head.h"

#include "gemm/gemm.h"
#include "kernels/cross_entropy.h"
#include "kernels/elementwise.h"
#include "kernels/embedding.h"
#include "kernels/norm.h"
#include "tandem/collectives.h"

namespace tandem {

Embedding::Embedding(ModelContext& c)
    : context_(c),
      looked_up_(c.make(c.options.dtype, c.tokens, c.config.hidden)),
      shard_(c.make(c.options.dtype, c.local_rows.count, c.config.hidden)),
      order_(c.make(DType::i32, 2, embedding_order(c.exec, c.tokens))) {}

void Embedding::forward(const Tensor& tokens, const Tensor& x) {
  embedding_forward(context_.exec, tokens, context_.weights.matrix(context_.layout.embedding),
                    context_.layout.vocab_begin, looked_up_);
  const bool narrow = x.dtype() != shard_->dtype();
  reduce_scatter(context_.tp, looked_up_, narrow ? *shard_ : x,
                 context_.options.codec.embeddings);  // one term is nonzero: exact without a codec
  if (narrow) cast(context_.exec, shard_, x);
}

void Embedding::backward(const Tensor& tokens, const Tensor& dx) {
  const bool narrow = dx.dtype() != shard_->dtype();
  if (narrow) cast(context_.exec, dx, shard_);
  all_gather(context_.tp, narrow ? *shard_ : dx, looked_up_);
  embedding_backward(context_.exec, tokens, looked_up_, context_.layout.vocab_begin,
                     context_.gradient_to_add(context_.layout.embedding), order_);
}

namespace {

/// On one rank, runs the weight gradient's GEMM once, on zeros, if that chooses its algorithm.
Communicator& with_gemms(ModelContext& c) {
  if (!times_algorithms(c.exec) || c.tp.size() > 1) return c.tp;
  const Activation x = c.make(c.options.dtype, c.tokens, c.config.hidden),
                   dlogits = c.make(c.options.dtype, c.tokens, c.layout.vocab);
  for (const bool adds : {false, true}) {
    gemm(c.exec, dlogits->transposed(), x, c.gradient(c.layout.head), {.accumulate = adds});
  }
  wait(c.exec);
  return c.tp;
}

}  // namespace

Head::Head(ModelContext& c)
    : context_(c),
      product_(with_gemms(c), {c.tokens, c.layout.vocab, c.config.hidden, c.options.dtype},
               with_wire(c.options.overlap, c.options.codec.embeddings)),
      dgrad_(make_dgrad(c, c.layout.head)),
      wgrad_(make_wgrad(c, c.layout.head)),
      dlogits_(c.make(
          c.options.dtype,
          dlogits_replace_logits(c.exec) || c.layout.tied != TiedEmbedding::none ? 0 : c.tokens,
          c.layout.vocab)),
      d_x_norm_(c.make(c.options.dtype, c.local_rows.count, c.config.hidden)),
      loss_(sizeof(double), c.exec.device) {}

Tensor Head::norm_weight() const {
  return context_.weights.vector(context_.layout.final_norm, context_.config.hidden);
}

NextNorm Head::norm(const HeadActivations& saved) const {
  return {norm_weight(), saved.x_norm, saved.inverse_rms};
}

void Head::forward(const Tensor& targets, HeadActivations& saved) {
  const Exec& exec = context_.exec;
  const Tensor weight = context_.weights.matrix(context_.layout.head);
  product_.run(saved.x_norm, weight, saved.logits);
  const Tensor sums = saved.sums->rows(0, 1), picked = saved.sums->rows(1, 1);
  if (context_.tp.size() == 1) {
    cross_entropy_max_and_sum(exec, saved.logits, targets, saved.maxima, sums, picked);
  } else {
    cross_entropy_max(exec, saved.logits, saved.maxima);
    all_reduce(context_.tp, saved.maxima, ReduceOp::max);
    cross_entropy_sum(exec, saved.logits, targets, context_.layout.vocab_begin, saved.maxima, sums,
                      picked);
    all_reduce(context_.tp, saved.sums);
  }
  cross_entropy_loss(exec, targets, sums, picked, loss_.view(DType::u8, {sizeof(double)}));
}

double Head::take_loss() {
  const Tensor total = loss_.view(DType::u8, {sizeof(double)});
  double loss = 0;
  copy(context_.exec, total, Tensor(&loss, DType::u8, {sizeof(double)}));
  clear(context_.exec, total);
  return loss;
}

const Tensor& Head::dlogits(const HeadActivations& saved) const {
  if (saved.dlogits) return *saved.dlogits;
  return dlogits_->elements() == 0 ? saved.logits : dlogits_;
}

void Head::backward_weight(const HeadActivations& saved) {
  context_.write_weight_gradient(wgrad_, saved.x_norm, dlogits(saved), context_.layout.head);
}

void Head::backward(const Tensor& x, const Tensor& targets, float scale,
                    const HeadActivations& saved, const Tensor& dx, const Tensor& dnorm) {
  const Exec& exec = context_.exec;
  const ModelLayout& layout = context_.layout;
  const Tensor& dlogits = this->dlogits(saved);
  cross_entropy_backward(exec, saved.logits, targets, layout.vocab_begin, saved.maxima,
                         saved.sums->rows(0, 1), scale, dlogits);
  dgrad_.run(dlogits, context_.weights.matrix(layout.head).transposed(), d_x_norm_);
  if (layout.tied == TiedEmbedding::none) backward_weight(saved);
  clear(exec, dx);
  rms_norm_backward(exec, x, norm_weight(), saved.inverse_rms, d_x_norm_, dx, dnorm,
                    context_.norm_partial_sums,
                    context_.rounds_gradient() ? *context_.rounded_gradient : Tensor());
}

}  // namespace tandem
