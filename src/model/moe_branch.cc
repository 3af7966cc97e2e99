#include "model/moe_branch.h"

#include "gemm/gemm.h"
#include "kernels/elementwise.h"
#include "kernels/norm.h"
#include "tandem/collectives.h"

namespace tandem {
namespace {

MoeShape shape_of(const ModelContext& c) {
  return {.tokens = shard_of(c.tokens, c.tp.size(), 0).count,
          .hidden = c.config.hidden,
          .ffn = c.config.ffn_of_expert(),
          .experts = int(c.config.experts),
          .top_k = int(c.config.top_k),
          .tp = c.tp.size(),
          .dtype = c.options.dtype};
}

}  // namespace

MoeOptions moe_options(const OverlapOptions& overlap, const CodecPolicy& codec) {
  return {overlap.strategy, overlap.chunks, codec.experts, codec.experts};
}

RouterOptions router_options(const ModelConfig& config) {
  return {int(config.top_k), config.router == "sigmoid", config.normalize_top_k,
          float(config.route_scale)};
}

MoeOperators::MoeOperators(ModelContext& c)
    : layer(c.experts, shape_of(c), moe_options(c.options.overlap, c.options.codec)),
      routed(c.options.dtype, c.own.count, c.config.hidden),
      doutput(c.options.dtype, c.own.count, c.config.hidden),
      dnormed(DType::f32, c.own.count, c.config.hidden),
      normed(DType::f32, c.options.dtype == DType::f32 ? 0 : c.own.count, c.config.hidden),
      logits(DType::f32, c.own.count, c.config.experts),
      dlogits(DType::f32, c.own.count, c.config.experts),
      dweights(DType::f32, c.own.count, c.config.top_k),
      drouter(DType::f32, c.config.experts, c.config.hidden) {}

MoeBranch::MoeBranch(ModelContext& c, MoeOperators& operators, BranchOperators* shared,
                     const BranchLayout& l)
    : context_(c),
      operators_(operators),
      layout_(l),
      shared_(shared ? std::make_unique<Branch>(c, *shared, l) : nullptr) {}

std::span<const float> MoeBranch::norm_weight() const {
  return context_.weights.norm(layout_.begin, context_.config.hidden);
}
std::span<const float> MoeBranch::bias() const {
  if (layout_.router_bias < 0) return {};
  return context_.weights.norm(layout_.router_bias, context_.config.experts);
}

/// Routers compute in f32: a choice that bf16 changed would change the loss by a jump.
const Tensor& MoeBranch::router_input(const MoeActivations& kept) {
  if (context_.options.dtype == DType::f32) return kept.normed;
  cast(kept.normed, operators_.normed);
  return operators_.normed;
}

void MoeBranch::forward(const Tensor& x, const Tensor& y, MoeActivations& kept, ExpertLoad* load) {
  const Weights& weights = context_.weights;
  MoeOperators& o = operators_;
  rms_norm_forward(x, norm_weight(), context_.config.norm_eps, kept.normed,
                   {kept.inverse_rms->as<float>(), size_t(context_.own.count)});
  gemm(router_input(kept), weights.master(layout_.router).transposed(), o.logits);
  route_forward(o.logits, bias(), router_options(context_.config), kept.scores, kept.chosen,
                kept.weights);
  o.layer.forward(kept.normed, {kept.chosen, kept.weights}, weights.matrix(layout_.experts_in),
                  weights.matrix(layout_.experts_out), o.routed, kept.batch);
  if (load) load->add(layout_.moe_layer, kept.scores, kept.chosen);
  if (shared_) shared_->forward(x, y, *kept.shared);
  add(shared_ ? y : x, o.routed, y);
}

void MoeBranch::backward(const Tensor& x, const Tensor& dx, std::span<float> dnorm,
                         const MoeActivations& kept, std::span<const float> balance) {
  const Weights& weights = context_.weights;
  MoeOperators& o = operators_;
  const bool narrow = dx.dtype() != o.doutput->dtype();
  if (narrow) cast(dx, o.doutput);
  o.layer.backward(narrow ? *o.doutput : dx, weights.matrix(layout_.experts_in),
                   weights.matrix(layout_.experts_out), kept.batch, o.dnormed, o.dweights,
                   context_.gradient(layout_.experts_in), context_.gradient(layout_.experts_out));
  router_backward(kept, balance);
  if (shared_) shared_->backward(x, dx, dnorm, *kept.shared);
  rms_norm_backward(x, norm_weight(), {kept.inverse_rms->as<float>(), size_t(context_.own.count)},
                    o.dnormed, dx, dnorm);
}

void MoeBranch::router_backward(const MoeActivations& kept, std::span<const float> balance) {
  MoeOperators& o = operators_;
  route_backward(kept.scores, kept.chosen, o.dweights, balance, router_options(context_.config),
                 o.dlogits);
  gemm(o.dlogits, context_.weights.master(layout_.router), o.dnormed, {.accumulate = true});
  const Tensor gradient = context_.gradient(layout_.router);
  if (context_.tp.size() == 1) {
    return gemm(o.dlogits->transposed(), router_input(kept), gradient, {.accumulate = true});
  }
  gemm(o.dlogits->transposed(), router_input(kept), o.drouter);
  all_reduce(context_.tp, o.drouter);  // each rank saw its own rows of the residual stream
  add(gradient, o.drouter, gradient);
}

}  // namespace tandem
