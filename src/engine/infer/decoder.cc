#include "engine/infer/decoder.h"

#include <algorithm>

#include "core/host_copy.h"
#include "engine/infer/decoder_parts.h"
#include "engine/model/router.h"
#include "gemm/gemm.h"
#include "kernels/elementwise.h"
#include "kernels/embedding.h"
#include "kernels/moe.h"
#include "kernels/norm.h"
#include "kernels/swiglu.h"
#include "tandem/collectives.h"
#include "tandem/error.h"

namespace tandem {

const DecoderForms& device_forms(const Exec& exec) {
  static constexpr DecoderForms kHost{true, true, true, false}, kGpu{false, false, false, true};
  return exec.on_gpu() ? kGpu : kHost;
}

TokenRows::TokenRows(const Exec& exec, int64_t rows)
    : exec_(exec), tokens_(DType::i32, 1, rows, exec.device), upload_(exec, tokens_->bytes()) {}

Tensor TokenRows::upload(std::span<const int32_t> tokens) {
  const auto count = int64_t(tokens.size());
  const Tensor rows(tokens_->data(), DType::i32, {count}, exec_.device);
  upload_.run(exec_, Tensor::of(tokens, {count}), rows);
  return rows;
}

DecoderExperts::DecoderExperts(const DecoderContext& c, int64_t rows, bool split,
                               const OverlapOptions& overlap)
    : context_(c),
      input_(c.f32(c.dtype == DType::f32 ? 0 : rows, c.config.hidden)),
      logits_(c.f32(rows, c.config.experts)),
      scores_(c.f32(rows, c.config.experts)),
      chosen_(DType::i32, rows, c.config.top_k, c.exec.device),
      weights_(c.f32(rows, c.config.top_k)),
      out_(c.f32(rows, c.config.hidden)),
      gate_up_(c.activation(1, 2 * c.config.ffn_per_expert())),
      inner_(c.activation(1, c.config.ffn_per_expert())),
      product_(c.f32(1, c.config.hidden)) {
  if (!split && c.forms().runs_one_row) return;
  layer_.emplace(c.tp,
                 MoeShape{.tokens = shard_of(rows, c.tp.size(), 0).count,
                          .hidden = c.config.hidden,
                          .ffn = c.config.ffn_per_expert(),
                          .experts = int(c.config.experts),
                          .top_k = int(c.config.top_k),
                          .tp = c.tp.size(),
                          .dtype = c.dtype},
                 options_on(c.tp, moe_options(overlap, c.codec)));
}

void DecoderExperts::run_shared(const BranchLayout& b, const Tensor& x_norm, const Tensor& w_in,
                                const Tensor& w_out, const Tensor& x) {
  if (!layer_) return run(b, x_norm, w_in, w_out, x);
  Communicator& tp = context_.tp;
  const Shard local = shard_of(x.dim(0), tp.size(), tp.rank());
  const Tensor rows = x.rows(local.begin, local.count);
  run(b, x_norm.rows(local.begin, local.count), w_in, w_out, rows);
  all_gather(tp, rows, x);
}

void DecoderExperts::run(const BranchLayout& b, const Tensor& x_norm, const Tensor& w_in,
                         const Tensor& w_out, const Tensor& x) {
  const int64_t rows = x_norm.dim(0);
  const auto first = [&](const Activation& a) { return a->rows(0, rows); };
  route(context_.view(), b, router_input(context_.exec, x_norm, input_),
        {first(logits_), first(scores_), first(chosen_), first(weights_)});
  if (layer_) {
    layer_->forward(x_norm, {first(chosen_), first(weights_)}, w_in, w_out, first(out_), batch_);
  } else {
    run_row(x_norm, w_in, w_out, out_);
  }
  add(context_.exec, x, first(out_), x);
}

/// Computes this rank's shard of the chosen experts, then sums over the ranks.
void DecoderExperts::run_row(const Tensor& x_norm, const Tensor& w_in, const Tensor& w_out,
                             const Tensor& out) {
  const DecoderContext& c = context_;
  const int64_t hidden = c.config.hidden, f = w_out.dim(1);
  const Tensor h = reshaped(gate_up_, 1, 2 * f), inner = reshaped(inner_, 1, f);
  std::fill_n(out.as<float>(), hidden, 0.0f);
  for (int64_t i = 0; i < c.config.top_k; ++i) {
    const int64_t expert = chosen_->as<int32_t>()[i];
    const float weight = weights_->as<float>()[i];
    gemm(x_norm, w_in.rows(expert * 2 * f, 2 * f).transposed(), h);
    swiglu_forward(c.exec, h.narrow(1, 0, f), h.narrow(1, f, f), inner);
    gemm(inner, w_out.rows(expert * hidden, hidden).transposed(), product_);
    add_weighted(product_->as<float>(), weight, hidden, out.as<float>());
  }
  all_reduce(c.tp, out, c.codec.experts);
}

BranchProducts make_products(const DecoderContext& c, int64_t rows, const OverlapOptions& overlap) {
  BranchProducts all;
  for (const BranchLayout& b : c.layout.branches) {
    auto& products = all[branch_kind(b)];
    if (products || !b.has_products()) continue;
    products = std::make_unique<RowProducts>(
        AgGemm(c.tp, {rows, b.in.rows, c.config.hidden, c.dtype}, options_on(c.tp, overlap)),
        GemmRs(c.tp, {rows, c.config.hidden, b.out.columns, c.dtype},
               options_on(c.tp, with_wire(overlap, branch_wire(c.codec, b)))));
  }
  return all;
}

PrefillBlock::PrefillBlock(const DecoderContext& c, int64_t rows, const OverlapOptions& overlap)
    : context_(c),
      rows_(rows),
      local_rows_(shard_of(rows, c.tp.size(), c.tp.rank())),
      products_(make_products(c, rows, overlap)),
      padded_(size_t(rows)),
      tokens_(c.exec, rows),
      looked_up_(c.activation(rows, c.config.hidden)),
      shard_(c.activation(local_rows_.count, c.config.hidden)),
      x_(c.f32(local_rows_.count, c.config.hidden)),
      inverse_rms_(c.f32(1, local_rows_.count)),
      x_norm_(c.activation(local_rows_.count, c.config.hidden)),
      hidden_(c.activation(rows, widest_in(c.layout))),
      inner_(c.activation(rows, widest_inner(c.layout))),
      residual_(c.activation(local_rows_.count, c.config.hidden)) {
  if (c.config.moe_layers() > 0) {
    experts_ = std::make_unique<DecoderExperts>(c, rows, true, overlap);
  }
}

/// GEMMs gather and scatter the rows; keys and values are written to the caches.
struct PrefillBlock::Steps {
  PrefillBlock& block;
  size_t branch;
  int64_t count;

  const BranchLayout& layout() const { return block.context_.layout.branches[branch]; }
  RowProducts& products() const { return *block.products_[branch_kind(layout())]; }
  void in(const Tensor& x_norm, const Tensor& weight, const Tensor& hidden) {
    products().in.run(x_norm, weight, hidden);
  }
  void attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out) {
    const auto first = [&](const Tensor& rows) { return rows.rows(0, count); };
    block.context_.cache.attend(branch, 0, first(q), first(k), first(v), first(out));
  }
  void out(const Tensor& inner, const Tensor& weight) {
    products().out.run(inner, weight, block.residual_);
    program::finish_sum(block.context_.view(), layout(), block.residual_);
    add(block.context_.exec, block.x_, block.residual_, block.x_);
  }
  void experts(const Tensor& x_norm, const Tensor& w_in, const Tensor& w_out) {
    block.experts_->run(layout(), x_norm, w_in, w_out, block.x_);
  }
};

void PrefillBlock::run(std::span<const int32_t> tokens, int64_t position, const Tensor& last) {
  const DecoderContext& c = context_;
  std::ranges::fill(padded_, 0);  // padding rows are computed and ignored
  std::ranges::copy(tokens, padded_.begin());
  c.cache.set_rows(position, int64_t(tokens.size()));
  embedding_forward(c.exec, tokens_.upload(padded_), c.weights.matrix(c.layout.embedding),
                    c.layout.vocab_begin, looked_up_);
  reduce_scatter(c.tp, looked_up_, shard_, c.codec.embeddings);
  cast(c.exec, shard_, x_);
  for (size_t i = 0; i < c.layout.branches.size(); ++i) {
    const BranchLayout& b = c.layout.branches[i];
    forward_branch(c.view(), b, branch_values(b, x_norm_, inverse_rms_, hidden_, inner_, rows_),
                   Steps{*this, i, int64_t(tokens.size())}, x_);
  }
  const int64_t row = int64_t(tokens.size()) - 1;
  int owner = 0;
  while (row >=
         shard_of(rows_, c.tp.size(), owner).begin + shard_of(rows_, c.tp.size(), owner).count) {
    ++owner;
  }
  if (owner == c.tp.rank()) cast(c.exec, x_->rows(row - local_rows_.begin, 1), last);
  broadcast(c.tp, last, owner);
}

DecodeStep::DecodeStep(const DecoderContext& c, const OverlapOptions& overlap)
    : context_(c),
      tokens_(c.exec, 1),
      looked_up_(c.activation(1, c.config.hidden)),
      inverse_rms_(c.f32(1, 1)),
      x_norm_(c.activation(1, c.config.hidden)),
      hidden_(c.activation(1, widest_in(c.layout))),
      inner_(c.activation(1, widest_inner(c.layout))),
      residual_(c.activation(1, c.config.hidden)),
      experts_out_(c.f32(1, c.config.hidden)) {
  for (const BranchLayout& b : c.layout.branches) {
    if (b.moe && c.int8 && !row_experts_) row_experts_ = std::make_unique<RowExperts>(c, 1);
    if (b.moe && !c.int8 && !experts_) {
      experts_ = std::make_unique<DecoderExperts>(c, 1, false, overlap);
    }
    auto& out = out_[branch_kind(b)];
    if (out || c.int8 || !b.has_products() || !branch_wire(c.codec, b).is_none()) continue;
    out = std::make_unique<GemmAr>(c.tp, GemmAr::Shape{1, c.config.hidden, b.out.columns, c.dtype},
                                   options_on(c.tp, overlap));
  }
}

TokenHead::TokenHead(const DecoderContext& c)
    : context_(c),
      inverse_rms_(c.f32(1, 1)),
      x_norm_(c.activation(1, c.config.hidden)),
      local_logits_(c.f32(1, c.layout.vocab)),
      logits_(c.f32(1, c.config.vocab)),
      host_logits_(size_t(c.config.vocab)) {}

Tensor TokenHead::run(const Tensor& residual) {
  const DecoderContext& c = context_;
  rms_norm_forward(c.exec, residual, c.weights.vector(c.layout.final_norm, c.config.hidden),
                   c.config.stream_eps(), x_norm_, inverse_rms_);
  multiply(c, x_norm_, c.view().weight(c.layout.head), local_logits_);
  scale_logits(c.view(), local_logits_);
  const auto flat = [&](const Activation& row) {
    return Tensor(row->data(), DType::f32, {row->elements()}, c.exec.device);
  };
  all_gather(c.tp, flat(local_logits_), flat(logits_));
  const Tensor on_host = host_tensor(host_logits_);
  copy(c.exec, flat(logits_), on_host);
  return on_host;
}

/// Every rank has the whole row; partial products are summed over the ranks.
struct DecodeStep::Steps {
  DecodeStep& step;
  size_t branch;
  const Tensor& x;

  const BranchLayout& layout() const { return step.context_.layout.branches[branch]; }
  void in(const Tensor& x_norm, const LayerWeight& weight, const Tensor& hidden) {
    multiply(step.context_, x_norm, weight, hidden);
  }
  void attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out) {
    step.context_.cache.attend(branch, 0, q, k, v, out);
  }
  void out(const Tensor& inner, const LayerWeight& weight) {
    const DecoderContext& c = step.context_;
    if (const auto& product = step.out_[branch_kind(layout())]) {
      product->run(inner, weight, step.residual_);
    } else {
      multiply(c, inner, weight, step.residual_);
      all_reduce(c.tp, step.residual_, branch_wire(c.codec, layout()));
    }
    program::finish_sum(c.view(), layout(), step.residual_);
    add(c.exec, x, step.residual_, x);
  }
  void experts(const Tensor& x_norm, const Tensor& w_in, const Tensor& w_out) {
    if (step.experts_) return step.experts_->run_shared(layout(), x_norm, w_in, w_out, x);
    const DecoderContext& c = step.context_;
    step.row_experts_->run(layout(), x_norm, step.experts_out_);
    all_reduce(c.tp, step.experts_out_, c.codec.experts);
    add(c.exec, x, step.experts_out_, x);
  }
};

void DecodeStep::run(int32_t token, int64_t position, const Tensor& x) {
  const DecoderContext& c = context_;
  c.cache.set_rows(position, 1);
  embedding_forward(c.exec, tokens_.upload({&token, 1}), c.weights.matrix(c.layout.embedding),
                    c.layout.vocab_begin, looked_up_);
  all_reduce(c.tp, looked_up_, c.codec.embeddings);
  cast(c.exec, looked_up_, x);
  for (size_t i = 0; i < c.layout.branches.size(); ++i) {
    const BranchLayout& b = c.layout.branches[i];
    forward_branch(c.view(), b, branch_values(b, x_norm_, inverse_rms_, hidden_, inner_, 1),
                   Steps{*this, i, x}, x);
  }
}

}  // namespace tandem
