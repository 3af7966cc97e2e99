#include "engine/infer/step_experts.h"

#include <algorithm>

#include "engine/model/router.h"
#include "kernels/elementwise.h"
#include "kernels/moe.h"
#include "kernels/swiglu.h"
#include "tandem/collectives.h"

namespace tandem {

StepExperts::StepExperts(const DecoderContext& c, int64_t rows, const OverlapOptions& overlap)
    : context_(c),
      input_(c.f32(c.dtype == DType::f32 ? 0 : rows, c.config.hidden)),
      logits_(c.f32(rows, c.config.experts)),
      scores_(c.f32(rows, c.config.experts)),
      chosen_(DType::i32, rows, c.config.top_k, c.exec.device),
      weights_(c.f32(rows, c.config.top_k)),
      out_(c.f32(rows, c.config.hidden)),
      activation_(expert_activation(c.config)),
      x_(c.activation(c.coded ? rows : 0, c.config.hidden)),
      gate_up_(c.activation(x_->dim(0), 2 * c.config.ffn_per_expert())),
      inner_(c.activation(x_->dim(0), c.config.ffn_per_expert())),
      product_(c.f32(x_->dim(0), c.config.hidden)) {
  if (c.coded) return;
  MoeOptions options = moe_options(overlap, c.codec);
  if (activation_) options.activation = &*activation_;
  layer_.emplace(c.tp,
                 MoeShape{.tokens = shard_of(rows, c.tp.size(), 0).count,
                          .hidden = c.config.hidden,
                          .ffn = c.config.ffn_per_expert(),
                          .experts = int(c.config.experts),
                          .top_k = int(c.config.top_k),
                          .tp = c.tp.size(),
                          .dtype = c.dtype},
                 options_on(c.tp, options));
}

void StepExperts::choose(const BranchLayout& b, const Tensor& x_norm) {
  const DecoderContext& c = context_;
  const auto first = [&](const Activation& a) { return a->rows(0, x_norm.dim(0)); };
  route(c.view(), b, router_input(c.exec, x_norm, input_),
        {first(logits_), first(scores_), first(chosen_), first(weights_)});
}

void StepExperts::add_to_all(const BranchLayout& b, const Tensor& x_norm, const Tensor& w_in,
                             const Tensor& w_out, const Tensor& x) {
  Communicator& tp = context_.tp;
  const Shard local = shard_of(x.dim(0), tp.size(), tp.rank());
  const Tensor rows = x.rows(local.begin, local.count);
  add(b, x_norm.rows(local.begin, local.count), w_in, w_out, rows);
  if (tp.size() > 1) all_gather(tp, rows, x);
}

void StepExperts::add(const BranchLayout& b, const Tensor& x_norm, const Tensor& w_in,
                      const Tensor& w_out, const Tensor& x) {
  const auto first = [&](const Activation& a) { return a->rows(0, x_norm.dim(0)); };
  choose(b, x_norm);
  if (activation_) activation_->bias = expert_biases(context_.view(), b);
  if (const Tensor biases = expert_out_biases(context_.view(), b); biases.dims() > 0) {
    add_expert_biases(x, first(chosen_), first(weights_), biases, x);
  }
  layer_->forward(x_norm, {first(chosen_), first(weights_)}, w_in, w_out, first(out_), batch_);
  tandem::add(context_.exec, x, first(out_), x);
}

void StepExperts::compute_partial(const BranchLayout& b, const Tensor& x_norm,
                                  const Tensor& partial) {
  const DecoderContext& c = context_;
  const int64_t rows = x_norm.dim(0), top_k = c.config.top_k;
  choose(b, x_norm);
  std::fill_n(out_->as<float>(), rows * c.config.hidden, 0.0f);
  if (activation_) activation_->bias = expert_biases(c.view(), b);
  const Tensor biases = expert_out_biases(c.view(), b);
  if (biases.dims() > 0 && c.tp.rank() == 0) {  // once in the sum over the ranks
    add_expert_biases(out_->rows(0, rows), chosen_->rows(0, rows), weights_->rows(0, rows), biases,
                      out_->rows(0, rows));
  }
  for (int64_t expert = 0; expert < c.config.experts; ++expert) {
    routed_.clear();
    for (int64_t i = 0; i < rows * top_k; ++i) {
      if (chosen_->as<int32_t>()[i] != expert) continue;
      routed_.emplace_back(i / top_k, weights_->as<float>()[i]);
    }
    if (!routed_.empty()) add_expert(b, expert, x_norm);
  }
  cast(c.exec, out_->rows(0, rows), partial);
}

void StepExperts::add_expert(const BranchLayout& branch, int64_t expert, const Tensor& x_norm) {
  const DecoderContext& c = context_;
  const auto rows = int64_t(routed_.size());
  const int64_t hidden = c.config.hidden, f = branch.experts_out.columns;
  const Tensor x = x_->rows(0, rows), product = product_->rows(0, rows);
  const Tensor h = reshaped(gate_up_, rows, 2 * f), inner = reshaped(inner_, rows, f);
  for (int64_t i = 0; i < rows; ++i) {
    copy(c.exec, x_norm.rows(routed_[size_t(i)].first, 1), x.rows(i, 1));
  }
  c.coded->at(branch.experts_in).multiply(c.exec, x, h, {.first_row = expert * 2 * f});
  activation_ ? activation_->forward(int(expert), h, inner)
              : swiglu_forward(c.exec, h.narrow(1, 0, f), h.narrow(1, f, f), inner);
  c.coded->at(branch.experts_out).multiply(c.exec, inner, product, {.first_row = expert * hidden});
  for (int64_t i = 0; i < rows; ++i) {
    const auto [row, weight] = routed_[size_t(i)];
    add_weighted(product.as<float>() + i * hidden, weight, hidden,
                 out_->as<float>() + row * hidden);
  }
}

}  // namespace tandem
