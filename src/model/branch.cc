#include "model/branch.h"

#include "gemm/gemm.h"
#include "kernels/elementwise.h"
#include "kernels/norm.h"
#include "kernels/swiglu.h"

namespace tandem {
namespace {

ExpertPlace place_of(const Communicator& experts, const Communicator& tp) {
  return {experts.size() / tp.size(), experts.rank() / tp.size()};
}

}  // namespace

ModelContext::ModelContext(Communicator& communicator, const ModelConfig& model,
                           const TransformerOptions& transformer_options)
    : tp(communicator),
      experts(transformer_options.experts ? *transformer_options.experts : communicator),
      config(model),
      options(transformer_options),
      layout(config, tp.size(), tp.rank(), place_of(experts, tp)),
      weights(layout, options.dtype),
      gradient_memory(size_t(layout.size) * sizeof(float)),
      tokens(options.batch * options.seq),
      own(shard_of(tokens, tp.size(), tp.rank())),
      rope(options.seq, config.head_dim, config.rope_theta) {}

Tensor ModelContext::gradient(const WeightMatrix& m) const {
  return gradient_memory.view(DType::f32, {m.rows, m.columns}, size_t(m.offset) * sizeof(float));
}

BranchOperators::BranchOperators(ModelContext& c, const BranchLayout& l)
    : in(c.tp, {c.tokens, l.in.rows, c.config.hidden, c.options.dtype}, c.options.overlap),
      out(c.tp, {c.tokens, c.config.hidden, l.out.columns, c.options.dtype},
          with_wire(c.options.overlap, wire_of(c.options.codec, l))),
      out_dgrad(c.tp,
                {.m = c.tokens,
                 .n = l.out.columns,
                 .k = c.config.hidden,
                 .dtype = c.options.dtype,
                 .keep_gathered = true,
                 .weight_kn = true},
                c.options.overlap),
      in_dgrad(c.tp,
               {.m = c.tokens,
                .n = c.config.hidden,
                .k = l.in.rows,
                .dtype = c.options.dtype,
                .weight_kn = true},
               c.options.overlap),
      in_wgrad(c.tp, {c.tokens, l.in.rows, c.config.hidden, c.options.dtype}, c.options.overlap),
      residual(c.options.dtype, c.own.count, c.config.hidden),
      doutput(c.options.dtype, c.own.count, c.config.hidden),
      dinner(c.options.dtype, c.tokens, l.out.columns),
      dhidden(c.options.dtype, c.tokens, l.in.rows),
      dnormed(c.options.dtype, c.own.count, c.config.hidden) {
  if (l.attention) {
    const AttentionShape shape{c.options.batch, c.options.seq, c.layout.heads, c.layout.kv_heads,
                               c.config.head_dim};
    attention = std::make_unique<Attention>(shape, c.rope);
  }
}

Branch::Branch(ModelContext& c, BranchOperators& operators, const BranchLayout& l)
    : context_(c), operators_(operators), layout_(l) {}

std::span<const float> Branch::norm_weight() const {
  return context_.weights.norm(layout_.begin, context_.config.hidden);
}

void Branch::forward(const Tensor& x, const Tensor& y, BranchActivations& kept) {
  const Weights& weights = context_.weights;
  rms_norm_forward(x, norm_weight(), context_.config.norm_eps, kept.normed,
                   {kept.inverse_rms->as<float>(), size_t(context_.own.count)});
  operators_.in.run(kept.normed, weights.matrix(layout_.in), kept.hidden);
  const HiddenViews h = split_hidden(context_.layout, layout_, kept.hidden);
  const InnerViews inner = split_inner(context_.layout, layout_, kept.inner);
  if (layout_.attention)
    operators_.attention->forward(h.q, h.k, h.v, inner.attention, kept.log_sums);
  if (layout_.mlp) swiglu_forward(h.gate, h.up, inner.mlp);
  operators_.out.run(kept.inner, weights.matrix(layout_.out), operators_.residual);
  add(x, operators_.residual, y);
}

void Branch::backward(const Tensor& x, const Tensor& dx, std::span<float> dnorm,
                      const BranchActivations& kept) {
  const Weights& weights = context_.weights;
  BranchOperators& o = operators_;
  const bool narrow = dx.dtype() != o.doutput->dtype();
  if (narrow) cast(dx, o.doutput);
  o.out_dgrad.run(narrow ? *o.doutput : dx, weights.matrix(layout_.out).transposed(), o.dinner);
  gemm(o.out_dgrad.gathered().transposed(), kept.inner, context_.gradient(layout_.out),
       {.accumulate = true});

  const ModelLayout& l = context_.layout;
  const HiddenViews h = split_hidden(l, layout_, kept.hidden);
  const HiddenViews dh = split_hidden(l, layout_, o.dhidden);
  const InnerViews inner = split_inner(l, layout_, kept.inner);
  const InnerViews dinner = split_inner(l, layout_, o.dinner);
  if (layout_.attention) {
    o.attention->backward(h.q, h.k, h.v, inner.attention, kept.log_sums, dinner.attention, dh.q,
                          dh.k, dh.v);
  }
  if (layout_.mlp) swiglu_backward(h.gate, h.up, dinner.mlp, dh.gate, dh.up);
  o.in_dgrad.run(o.dhidden, weights.matrix(layout_.in).transposed(), o.dnormed);
  o.in_wgrad.run(kept.normed, o.dhidden, context_.gradient(layout_.in));
  rms_norm_backward(x, norm_weight(), {kept.inverse_rms->as<float>(), size_t(context_.own.count)},
                    o.dnormed, dx, dnorm);
}

}  // namespace tandem
