#include "engine/model/head.h"

#include <fmt/format.h>

#include "gemm/gemm.h"
#include "kernels/cross_entropy.h"
#include "kernels/elementwise.h"
#include "kernels/embedding.h"
#include "kernels/norm.h"
#include "kernels/outer_step.h"
#include "kernels/softcap.h"
#include "tandem/collectives.h"
#include "tandem/error.h"

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

/// Rows of all ranks that the head computes at a time.
int64_t rows_at_once(const ModelContext& c) {
  const int64_t rows = c.options.head_rows;
  if (rows == 0) return c.tokens;
  const bool divides = rows > 0 && c.tokens % rows == 0 && rows % c.tp.size() == 0;
  if (divides && c.layout.tied == TiedEmbedding::none) return rows;
  throw InvalidArgument(fmt::format(
      "head_rows {}: expected a divisor of batch x seq = {} and a multiple of {} ranks, and an "
      "embedding that is not tied to another stage's",
      rows, c.tokens, c.tp.size()));
}

/// On one rank, runs the weight gradient's GEMM once, on zeros, if that chooses its algorithm.
Communicator& with_gemms(ModelContext& c, int64_t rows) {
  if (!times_algorithms(c.exec) || c.tp.size() > 1) return c.tp;
  const Activation x = c.make(c.options.dtype, rows, c.config.hidden),
                   dlogits = c.make(c.options.dtype, rows, c.layout.vocab);
  const WeightMatrix& m = c.layout.head;
  const bool is_summed = c.options.head_rows > 0 && c.options.gradient_dtype != DType::f32;
  const Tensor to =
      is_summed ? c.gradient_sum.view(DType::f32, {m.rows, m.columns}) : c.gradient(m);
  for (const bool adds : {false, true}) {
    gemm(c.exec, dlogits->transposed(), x, to, {.accumulate = adds});
  }
  wait(c.exec);
  return c.tp;
}

}  // namespace

Head::Head(ModelContext& c)
    : context_(c),
      rows_(rows_at_once(c)),
      product_(with_gemms(c, rows_), {rows_, c.layout.vocab, c.config.hidden, c.options.dtype},
               options_on(c.tp, with_wire(c.options.overlap, c.options.codec.embeddings))),
      dgrad_(make_dgrad(c, c.layout.head, rows_)),
      wgrad_(make_wgrad(c, c.layout.head, rows_)),
      dlogits_(
          c.make(c.options.dtype,
                 dlogits_replace_logits(c.exec) || c.layout.tied != TiedEmbedding::none ? 0 : rows_,
                 c.layout.vocab)),
      chunk_targets_(c.make(DType::i32, 1, c.options.head_rows)),
      d_x_norm_(c.make(c.options.dtype, c.local_rows.count, c.config.hidden)),
      scaled_norm_(c.make(DType::f32, c.config.logits_scaling == 1 ? 0 : 1, c.config.hidden)),
      loss_(sizeof(double), c.exec.device) {
  if (c.options.head_rows > 0) chunk_.emplace(c, rows_);
}

NormWeight Head::norm_weight() const {
  const ModelContext& c = context_;
  const NormWeight norm = LayerView{c.config, c.layout, c.weights, c.exec}.final_norm();
  if (c.config.logits_scaling == 1) return norm;
  const auto factor = float(1 / c.config.logits_scaling);
  const Tensor scaled(scaled_norm_->data(), DType::f32, {norm.elements()}, c.exec.device);
  tandem::scale(c.exec, norm.values, factor, scaled);
  return {scaled, norm.offset * factor};
}

NextNorm Head::norm(const HeadActivations& saved) const {
  return {norm_weight(), saved.x_norm, saved.inverse_rms};
}

void Head::forward(const Tensor& targets, const HeadActivations& saved) {
  if (!chunk_) add_loss(saved.x_norm, targets, saved);
}

void Head::for_each_chunk(
    const Tensor& targets,
    const std::function<void(const Shard& rows, const Tensor& targets)>& visit) {
  const int tp = context_.tp.size();
  const int64_t count = rows_ / tp;
  const Tensor of_chunk(chunk_targets_->data(), DType::i32, {rows_}, context_.exec.device);
  for (int64_t begin = 0; begin < context_.local_rows.count; begin += count) {
    for (int rank = 0; rank < tp; ++rank) {
      const int64_t of_rank = shard_of(context_.tokens, tp, rank).begin;
      copy(context_.exec, targets.narrow(0, of_rank + begin, count),
           of_chunk.narrow(0, rank * count, count));
    }
    visit({begin, count}, of_chunk);
  }
}

void Head::add_loss(const Tensor& x_norm, const Tensor& targets, const HeadLogits& to) {
  const Exec& exec = context_.exec;
  const Tensor weight = context_.weights.matrix(context_.layout.head);
  product_.run(x_norm, weight, to.logits);
  if (context_.config.logits_softcap > 0) {
    softcap_forward(exec, to.logits, context_.config.logits_softcap);
  }
  const Tensor sums = to.sums->rows(0, 1), picked = to.sums->rows(1, 1);
  if (context_.tp.size() == 1) {
    cross_entropy_max_and_sum(exec, to.logits, targets, to.maxima, sums, picked);
  } else {
    cross_entropy_max(exec, to.logits, to.maxima);
    all_reduce(context_.tp, to.maxima, ReduceOp::max);
    cross_entropy_sum(exec, to.logits, targets, context_.layout.vocab_begin, to.maxima, sums,
                      picked);
    all_reduce(context_.tp, to.sums);
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
  if (!dlogits_replace_logits(context_.exec)) return dlogits_;  // also without rows
  return chunk_ ? chunk_->logits : saved.logits;
}

void Head::softmax_backward(const HeadLogits& of, const Tensor& targets, float scale,
                            const Tensor& dlogits) {
  cross_entropy_backward(context_.exec, of.logits, targets, context_.layout.vocab_begin, of.maxima,
                         of.sums->rows(0, 1), scale, dlogits);
  const double cap = context_.config.logits_softcap;
  if (cap > 0) softcap_backward(context_.exec, of.logits, cap, dlogits);
}

void Head::backward_by_rows(const Tensor& targets, float scale, const HeadActivations& saved) {
  const WeightMatrix& m = context_.layout.head;
  const Tensor weight = context_.weights.matrix(m).transposed();
  const Tensor& dlogits = this->dlogits(saved);
  context_.write_gradient(m, [&](const Tensor& values, bool adds) {
    if (context_.tokens == 0 && !adds) clear(context_.exec, values);  // there is no chunk
    for_each_chunk(targets, [&](const Shard& rows, const Tensor& of_chunk) {
      const Tensor x_norm = saved.x_norm->rows(rows.begin, rows.count);
      add_loss(x_norm, of_chunk, *chunk_);
      softmax_backward(*chunk_, of_chunk, scale, dlogits);
      dgrad_.run(dlogits, weight, d_x_norm_->rows(rows.begin, rows.count));
      context_.multiply_gradient(wgrad_, x_norm, dlogits, values, adds || rows.begin > 0);
    });
  });
}

void Head::backward_weight(const HeadActivations& saved) {
  context_.write_weight_gradient(wgrad_, saved.x_norm, dlogits(saved), context_.layout.head);
}

void Head::backward(const Tensor& x, const Tensor& targets, float scale,
                    const HeadActivations& saved, const Tensor& dx, const Tensor& dnorm) {
  const Exec& exec = context_.exec;
  const ModelLayout& layout = context_.layout;
  if (chunk_) {
    backward_by_rows(targets, scale, saved);
  } else {
    const Tensor& dlogits = this->dlogits(saved);
    softmax_backward(saved, targets, scale, dlogits);
    dgrad_.run(dlogits, context_.weights.matrix(layout.head).transposed(), d_x_norm_);
    if (layout.tied == TiedEmbedding::none) backward_weight(saved);
  }
  clear(exec, dx);
  rms_norm_backward(exec, x, norm_weight(), saved.inverse_rms, d_x_norm_, dx, dnorm,
                    context_.norm_partial_sums,
                    context_.rounds_gradient() ? *context_.rounded_gradient : Tensor());
  if (context_.config.logits_scaling != 1) {
    tandem::scale(exec, dnorm, float(1 / context_.config.logits_scaling), dnorm);
  }
}

}  // namespace tandem
