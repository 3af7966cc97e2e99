#include "engine/infer/split_rows.h"

#include "engine/infer/decoder_parts.h"
#include "kernels/elementwise.h"
#include "kernels/embedding.h"
#include "tandem/collectives.h"

namespace tandem {

SplitRows::SplitRows(const DecoderContext& c, int64_t rows, const OverlapOptions& overlap,
                     const Tensor& hidden, const Tensor& inner)
    : context_(c),
      rows_(rows),
      local_(shard_of(rows, c.tp.size(), c.tp.rank())),
      products_(make_products(c, rows, overlap)),
      hidden_(hidden),
      inner_(inner),
      x_(c.f32(local_.count, c.config.hidden)),
      inverse_rms_(c.f32(1, local_.count)),
      x_norm_(c.activation(local_.count, c.config.hidden)),
      residual_(c.activation(local_.count, c.config.hidden)) {}

/// GEMMs gather and scatter the rows.
struct SplitRows::Steps {
  SplitRows& split;
  size_t branch;
  Residuals& residuals;
  int64_t count;
  DecoderExperts* experts_of_layer;

  const BranchLayout& layout() const { return split.context_.layout.branches[branch]; }
  RowProducts& products() const { return *split.products_[branch_kind(layout())]; }
  void in(const Tensor& x_norm, const Tensor& weight, const Tensor& hidden) {
    products().in.run(x_norm, weight, hidden);
  }
  void attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out) {
    const auto first = [&](const Tensor& all) { return all.narrow(0, 0, count); };
    split.context_.cache.attend(branch, 0, first(q), first(k), first(v), first(out));
  }
  void out(const Tensor& inner, const Tensor& weight) {
    products().out.run(inner, weight, split.residual_);
    program::finish_sum(split.context_.view(), layout(), split.residual_);
    residuals.add_sum(split.context_, !layout().moe);  // the next branch's norm adds it
  }
  void experts(const Tensor& x_norm, const Tensor& w_in, const Tensor& w_out) {
    experts_of_layer->run(layout(), x_norm, w_in, w_out, split.x_);
  }
};

void SplitRows::run(const Tensor& partial_embeddings, int64_t count, DecoderExperts* experts) {
  const DecoderContext& c = context_;
  reduce_scatter(c.tp, partial_embeddings, residual_, c.codec.embeddings);
  cast(c.exec, residual_, x_);
  Residuals residuals{x_, residual_};
  for (size_t i = 0; i < c.layout.branches.size(); ++i) {
    const BranchLayout& b = c.layout.branches[i];
    const program::Values values = branch_values(b, x_norm_, inverse_rms_, hidden_, inner_, rows_);
    residuals.norm(c, b, values);
    forward_branch(c.view(), b, values, Steps{*this, i, residuals, count, experts});
  }
  residuals.finish(c);
}

void SplitRows::gather(const Tensor& chosen, const Tensor& out) {
  embedding_forward(context_.exec, chosen, x_, local_.begin, out);  // zeros for others' rows
  all_reduce(context_.tp, out);
}

}  // namespace tandem
