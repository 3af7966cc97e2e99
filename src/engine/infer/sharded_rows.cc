#include "engine/infer/sharded_rows.h"

#include "kernels/elementwise.h"
#include "kernels/embedding.h"
#include "tandem/collectives.h"

namespace tandem {

ShardedRows::ShardedRows(const DecoderContext& c, int64_t rows, const OverlapOptions& overlap,
                         StepMemory& memory, StepExperts* experts)
    : context_(c),
      rows_(rows),
      local_(shard_of(rows, c.tp.size(), c.tp.rank())),
      memory_(memory),
      experts_(experts) {
  for (const BranchLayout& b : c.layout.branches) {
    auto& products = products_[branch_kind(b)];
    if (products || !b.has_products()) continue;
    products = std::make_unique<Products>(
        AgGemm(c.tp, {rows, b.in.rows, c.config.hidden, c.dtype}, options_on(c.tp, overlap)),
        GemmRs(c.tp, {rows, c.config.hidden, b.out.columns, c.dtype},
               options_on(c.tp, with_wire(overlap, branch_wire(c.codec, b)))));
  }
}

/// GEMMs gather and scatter the rows; padding has no keys.
struct ShardedRows::Steps {
  ShardedRows& all;
  size_t branch;
  Residuals& residuals;
  int64_t count;

  const BranchLayout& layout() const { return all.context_.layout.branches[branch]; }
  Products& products() const { return *all.products_[branch_kind(layout())]; }
  void in(const Tensor& x_norm, const LayerWeight& weight, const Tensor& hidden) const {
    products().in.run(x_norm, operand(all.context_, weight), hidden);
  }
  void sum_over_ranks(const Tensor& terms) const { all_reduce(all.context_.tp, terms); }
  void attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                 const Tensor& sinks) const {
    const auto first = [&](const Tensor& rows) { return rows.narrow(0, 0, count); };
    all.context_.cache.attend(branch, 0, first(q), first(k), first(v), first(out), sinks);
  }
  void out(const Tensor& inner, const LayerWeight& weight) const {
    products().out.run(inner, operand(all.context_, weight), residuals.sum);
    program::finish_sum(all.context_.view(), layout(), {}, residuals.sum);
    residuals.add_sum(all.context_, !layout().moe);  // the next branch's norm adds it
  }
  void experts(const Tensor& x_norm, const Tensor& w_in, const Tensor& w_out) const {
    residuals.finish(all.context_);
    all.experts_->add(layout(), x_norm, w_in, w_out, residuals.x);
  }
};

void ShardedRows::run(const Tensor& tokens, int64_t count) {
  const DecoderContext& c = context_;
  Residuals residuals{memory_.x->rows(0, local_.count), memory_.sum->rows(0, local_.count)};
  const Tensor partial = memory_.x_norm->rows(0, rows_);
  embedding_forward(c.exec, tokens, c.weights.matrix(c.layout.embedding), c.layout.vocab_begin,
                    partial);
  reduce_scatter(c.tp, partial, residuals.sum, c.codec.embeddings);
  cast(c.exec, residuals.sum, residuals.x);
  for (size_t i = 0; i < c.layout.branches.size(); ++i) {
    const BranchLayout& b = c.layout.branches[i];
    const program::Values values = branch_values(b, memory_, local_.count, rows_);
    residuals.norm(c, b, values);
    forward_branch(c.view(), b, values, Steps{*this, i, residuals, count});
  }
  residuals.finish(c);
}

void ShardedRows::gather(const Tensor& chosen, const Tensor& out) {
  // Zeros for others' rows.
  embedding_forward(context_.exec, chosen, memory_.x->rows(0, local_.count), local_.begin, out);
  all_reduce(context_.tp, out);
}

}  // namespace tandem
