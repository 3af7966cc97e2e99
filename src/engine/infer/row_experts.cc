#include <algorithm>

#include "engine/infer/decoder.h"
#include "engine/infer/decoder_parts.h"
#include "engine/model/router.h"
#include "kernels/elementwise.h"
#include "kernels/moe.h"
#include "kernels/swiglu.h"

namespace tandem {

RowExperts::RowExperts(const DecoderContext& c, int64_t rows)
    : context_(c),
      input_(c.f32(c.dtype == DType::f32 ? 0 : rows, c.config.hidden)),
      logits_(c.f32(rows, c.config.experts)),
      scores_(c.f32(rows, c.config.experts)),
      chosen_(DType::i32, rows, c.config.top_k),
      weights_(c.f32(rows, c.config.top_k)),
      x_(c.activation(rows, c.config.hidden)),
      gate_up_(c.activation(rows, 2 * c.config.ffn_per_expert())),
      inner_(c.activation(rows, c.config.ffn_per_expert())),
      product_(c.f32(rows, c.config.hidden)),
      out_(c.f32(rows, c.config.hidden)) {}

void RowExperts::run(const BranchLayout& branch, const Tensor& x_norm, const Tensor& partial) {
  const DecoderContext& c = context_;
  const int64_t rows = x_norm.dim(0), top_k = c.config.top_k;
  const auto first = [&](const Activation& a) { return a->rows(0, rows); };
  route(c.view(), branch, router_input(c.exec, x_norm, input_),
        {first(logits_), first(scores_), first(chosen_), first(weights_)});
  std::fill_n(out_->as<float>(), rows * c.config.hidden, 0.0f);
  for (int64_t expert = 0; expert < c.config.experts; ++expert) {
    routed_.clear();
    for (int64_t i = 0; i < rows * top_k; ++i) {
      if (chosen_->as<int32_t>()[i] != expert) continue;
      routed_.emplace_back(i / top_k, weights_->as<float>()[i]);
    }
    if (!routed_.empty()) add_expert(branch, expert, x_norm);
  }
  cast(c.exec, first(out_), partial);
}

void RowExperts::add_expert(const BranchLayout& branch, int64_t expert, const Tensor& x_norm) {
  const DecoderContext& c = context_;
  const auto rows = int64_t(routed_.size());
  const int64_t hidden = c.config.hidden, f = branch.experts_out.columns;
  const Tensor x = x_->rows(0, rows), product = product_->rows(0, rows);
  const Tensor h = reshaped(gate_up_, rows, 2 * f), inner = reshaped(inner_, rows, f);
  for (int64_t i = 0; i < rows; ++i) {
    copy(c.exec, x_norm.rows(routed_[size_t(i)].first, 1), x.rows(i, 1));
  }
  c.int8->at(branch.experts_in).multiply(x, h, expert * 2 * f);
  swiglu_forward(c.exec, h.narrow(1, 0, f), h.narrow(1, f, f), inner);
  c.int8->at(branch.experts_out).multiply(inner, product, expert * hidden);
  for (int64_t i = 0; i < rows; ++i) {
    const auto [row, weight] = routed_[size_t(i)];
    add_weighted(product.as<float>() + i * hidden, weight, hidden,
                 out_->as<float>() + row * hidden);
  }
}

}  // namespace tandem
