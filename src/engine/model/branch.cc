#include "engine/model/branch.h"

#include <set>
#include <vector>

#include "comm/exec.h"
#include "engine/model/router.h"
#include "engine/model/stage_placements.h"
#include "gemm/gemm.h"
#include "kernels/elementwise.h"
#include "kernels/row_ops.h"
#include "observe/recorder.h"
#include "tandem/collectives.h"

namespace tandem {
namespace {

ExpertCoordinates expert_coordinates(const Communicator& experts, const Communicator& tp) {
  return {experts.size() / tp.size(), experts.rank() / tp.size()};
}

MoeShape moe_shape(const ModelContext& c) {
  return {.tokens = shard_of(c.tokens, c.tp.size(), 0).count,
          .hidden = c.config.hidden,
          .ffn = c.config.ffn_per_expert(),
          .experts = int(c.config.experts),
          .top_k = int(c.config.top_k),
          .tp = c.tp.size(),
          .dtype = c.options.dtype};
}

MoeOptions training_moe_options(const ModelContext& c) {
  MoeOptions options = moe_options(c.options.overlap, c.options.codec);
  options.backward = true;
  return options;
}

/// On a GPU rank, runs the branch's GEMMs that are in no operator once, on zeros. Their algorithms
/// are then chosen before kernels wait for peers, and saved with those of the operators made next.
Communicator& with_gemms(ModelContext& c, const BranchLayout& l) {
  if (!c.exec.on_gpu()) return c.tp;
  const Activation hidden = c.make(c.options.dtype, c.tokens, c.config.hidden),
                   inner = c.make(c.options.dtype, c.tokens, l.out.columns),
                   dhidden = c.make(c.options.dtype, c.tokens, l.in.rows);
  for (const bool adds : {false, true}) {
    gemm(c.exec, hidden->transposed(), inner, c.gradient(l.out), {.accumulate = adds});
    if (c.tp.size() > 1) continue;
    gemm(c.exec, dhidden->transposed(), hidden, c.gradient(l.in), {.accumulate = adds});
  }
  wait(c.exec);
  return c.tp;
}

std::vector<int64_t> attention_windows(const ModelLayout& layout) {
  std::set<int64_t> windows;
  for (const BranchLayout& branch : layout.branches) {
    if (branch.attention) windows.insert(branch.window);
  }
  return {windows.begin(), windows.end()};
}

/// Its runs may rotate q and k in a branch's `hidden`: only backward reads them afterwards, as they
/// were left.
std::unique_ptr<Attention> make_attention(ModelContext& c, const BranchLayout& l) {
  if (!l.attention) return nullptr;
  const AttentionShape shape{c.options.batch, c.options.seq, c.layout.heads, c.layout.kv_heads,
                             c.config.head_dim};
  return std::make_unique<Attention>(
      c.exec, shape, c.rope,
      AttentionRows{c.options.dtype, l.in.rows, l.out.columns, c.options.deterministic,
                    attention_windows(c.layout)});
}

}  // namespace

ModelContext::ModelContext(Communicator& communicator, const ModelConfig& model,
                           const TransformerOptions& transformer_options,
                           const StageLayers& stage_layers)
    : tp(communicator),
      exec(make_exec(communicator)),
      experts(transformer_options.experts ? *transformer_options.experts : communicator),
      config(model),
      options(transformer_options),
      layers(stage_layers),
      layout(config, tp.size(), tp.rank(), expert_coordinates(experts, tp), stage_layers),
      weights(exec, layout, options.dtype, options.f32_weights),
      gradients(exec, assign_gradients(layout, config, options.gradient_window)),
      tokens(options.batch * options.seq),
      local_rows(shard_of(tokens, tp.size(), tp.rank())),
      rope(exec, options.seq, config.head_dim, config.rope_theta, config.rope_scaling),
      norm_partial_sums(make(
          DType::f32, rms_norm_partial_sums(exec, local_rows.count, config.hidden), config.hidden)),
      rounded_gradient(
          make(options.dtype, rounds_gradient() ? local_rows.count : 0, config.hidden)),
      recomputed(std::make_unique<RecomputedActivations>(*this)) {
  PlacementTable placements;  // throws if an operator of the stage cannot consume a tensor
  declare_stage(config, layout, layers, placements);
  set_exec(experts, exec);
}

ModelLayout ModelContext::whole_layout() const {
  return {config, tp.size(), tp.rank(), expert_coordinates(experts, tp)};
}

Tensor ModelContext::gradient(const WeightMatrix& m) const {
  const Tensor flat = gradients.at(m.offset, m.rows * m.columns);
  return Tensor(flat.data(), DType::f32, {m.rows, m.columns}, flat.device());
}

Tensor ModelContext::gradient_to_add(const WeightMatrix& m) {
  const Tensor result = gradient(m);
  if (!adds_gradient(m.offset)) clear(exec, result);
  return result;
}

void ModelContext::sum_gradient(const Tensor& term, const WeightMatrix& m) {
  all_reduce(tp, term);
  const Tensor sum = gradient(m);
  if (adds_gradient(m.offset)) return add(exec, sum, term, sum);
  copy(exec, term, sum);
}

void ModelContext::write_weight_gradient(std::optional<AgWgrad>& wgrad, const Tensor& x,
                                         const Tensor& dy, const WeightMatrix& m) {
  if (wgrad) return wgrad->run(x, dy, gradient_to_add(m));
  const ScopedLabel label("ag_wgrad", -1);
  gemm(exec, dy.transposed(), x, gradient(m), {.accumulate = adds_gradient(m.offset)});
}

std::optional<AgWgrad> make_wgrad(ModelContext& c, const WeightMatrix& m) {
  if (c.tp.size() == 1) return {};
  return AgWgrad(c.tp, {c.tokens, m.rows, c.config.hidden, c.options.dtype}, c.options.overlap);
}

BranchProducts::BranchProducts(ModelContext& c, const BranchLayout& l)
    : attention(make_attention(c, l)),
      in(with_gemms(c, l), {c.tokens, l.in.rows, c.config.hidden, c.options.dtype},
         c.options.overlap),
      out(c.tp, {c.tokens, c.config.hidden, l.out.columns, c.options.dtype},
          with_wire(c.options.overlap, branch_wire(c.options.codec, l))),
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
      in_wgrad(make_wgrad(c, l.in)),
      residual(c.make(c.options.dtype, c.local_rows.count, c.config.hidden)),
      d_act(c.make(c.options.dtype, c.tokens, l.out.columns)),
      dhidden(c.make(c.options.dtype, c.tokens, l.in.rows)),
      d_x_norm(c.make(c.options.dtype, c.local_rows.count, c.config.hidden)),
      d_qk_norm(c.make(DType::f32, l.q_norm >= 0 ? 1 : 0, 2 * c.config.head_dim)),
      d_gate_before(
          c.make(DType::f32, l.has_shared_gate && c.tp.size() > 1 ? 1 : 0, c.config.hidden)) {}

BranchExperts::BranchExperts(ModelContext& c, const BranchLayout& l)
    : routed(c.make(c.options.dtype, c.local_rows.count, c.config.hidden)),
      d_x_norm(c.make(DType::f32, c.local_rows.count, c.config.hidden)),
      x_norm(c.make(DType::f32, c.options.dtype == DType::f32 ? 0 : c.local_rows.count,
                    c.config.hidden)),
      logits(c.make(DType::f32, c.local_rows.count, c.config.experts)),
      dlogits(c.make(DType::f32, c.local_rows.count, c.config.experts)),
      dweights(c.make(DType::f32, c.local_rows.count, c.config.top_k)),
      drouter(c.make(DType::f32, c.config.experts, c.config.hidden)),
      layer(with_router_gemms(c, l), moe_shape(c), training_moe_options(c)) {
  prepare(c.recomputed->branches);
}

void BranchExperts::prepare(std::span<const BranchActivations> branches) {
  for (const BranchActivations& each : branches) {
    if (each.expert_memory) layer.prepare(*each.expert_memory);
  }
}

std::unique_ptr<MicrobatchState> make_state(const ModelContext& c, BranchExperts* experts,
                                            bool owns_input) {
  auto state = std::make_unique<MicrobatchState>(c, owns_input);
  if (experts) experts->prepare(state->branches);
  return state;
}

Communicator& BranchExperts::with_router_gemms(ModelContext& c, const BranchLayout& l) {
  const Tensor router = c.weights.router(l.router);
  const Tensor& rows = d_x_norm;
  gemm(c.exec, rows, router.transposed(), logits);
  gemm(c.exec, dlogits, router, d_x_norm, {.accumulate = true});
  for (const bool adds : {false, true}) {
    gemm(c.exec, dlogits->transposed(), rows, drouter, {.accumulate = adds});
  }
  wait(c.exec);
  return c.experts;
}

Branch::Branch(ModelContext& c, BranchProducts* products, BranchExperts* experts,
               const BranchLayout& l)
    : context_(c), products_(products), experts_(experts), layout_(l) {}

LayerView Branch::view() const {
  return {context_.config, context_.layout, context_.weights, context_.exec};
}

/// Training steps: the residual stream is row-sharded over the ranks; activations are saved for
/// backward.
struct Branch::Steps {
  Branch& branch;
  const Tensor &x, &y;
  const BranchActivations& saved;
  ExpertLoad* load;
  const std::optional<NextNorm>& next;

  void in(const Tensor& x_norm, const Tensor& weight, const Tensor& hidden) {
    branch.products_->in.run(x_norm, weight, hidden);
    branch.context_.run_between_operators();
  }
  void attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out) {
    branch.products_->attention->forward(branch.context_.exec, q, k, v, out, saved.log_sums,
                                         {branch.layout_.window, saved.document_starts});
    branch.context_.run_between_operators();
  }
  void out(const Tensor& inner, const Tensor& weight) {
    if (!has_result()) return;
    branch.products_->out.run(inner, weight, branch.products_->residual);
    if (branch.experts_) return add(branch.context_.exec, x, branch.products_->residual, y);
    add_last(x, branch.products_->residual);
  }
  void experts(const Tensor& x_norm, const Tensor& w_in, const Tensor& w_out) {
    BranchExperts& e = *branch.experts_;
    route(branch.view(), branch.layout_, router_input(branch.context_.exec, x_norm, e.x_norm),
          {e.logits, saved.scores, saved.chosen, saved.weights}, saved.padded_tokens);
    e.layer.forward(x_norm, {saved.chosen, saved.weights}, w_in, w_out, e.routed, *saved.experts);
    if (load) load->add(branch.layout_.moe_layer, saved.scores, saved.chosen);
    if (has_result()) add_last(branch.products_ ? y : x, e.routed);
  }
  bool has_result() const { return y.dims() > 0; }
  void add_last(const Tensor& sum, const Tensor& added) {
    const Exec& exec = branch.context_.exec;
    if (!next) return add(exec, sum, added, y);
    add_rms_norm_forward(exec, sum, added, next->weight, branch.context_.config.norm_eps, y,
                         next->x_norm, next->inverse_rms);
  }
};

NextNorm Branch::norm(const BranchActivations& saved) const {
  return {view().norm(layout_), saved.x_norm, saved.inverse_rms};
}

void Branch::forward(const Tensor& x, const Tensor& y, const BranchActivations& saved,
                     ExpertLoad* load, const std::optional<NextNorm>& next) {
  const BranchMemory memory{saved.x_norm, saved.inverse_rms, saved.hidden, saved.inner,
                            saved.unnormalized};
  forward_normalized(view(), layout_, memory, Steps{*this, x, y, saved, load, next});
}

void Branch::backward(const Tensor& x, const Tensor& dx, const Tensor& dnorm,
                      const BranchActivations& saved, const Tensor& balance, bool is_split) {
  const Tensor& dy = context_.rounded(dx);
  if (experts_) experts_backward(dy, saved, balance);
  if (products_) products_backward(dy, saved, is_split);
  if (products_) norm_backward(x, products_->d_x_norm, saved, dx, dnorm, !experts_);
  if (experts_) norm_backward(x, experts_->d_x_norm, saved, dx, dnorm, true);
}

void Branch::recompute_unsaved(const Tensor& x, const BranchActivations& saved) {
  const Weights& weights = context_.weights;
  rms_norm_forward(context_.exec, x, view().norm(layout_), context_.config.norm_eps, saved.x_norm,
                   saved.inverse_rms);
  if (products_) {
    const HiddenViews hidden = split_hidden(context_.layout, layout_, saved.hidden);
    const InnerViews inner = split_inner(context_.layout, layout_, saved.inner);
    if (layout_.attention) {
      products_->attention->forward_again(context_.exec, hidden.q, hidden.k, hidden.v,
                                          inner.attention, saved.log_sums,
                                          {layout_.window, saved.document_starts});
    }
    if (layout_.mlp) swiglu_forward(context_.exec, hidden.gate, hidden.up, inner.mlp);
    if (layout_.has_shared_gate) gate_rows(context_.exec, hidden.shared_gate, inner.mlp);
  }
  if (experts_) {
    experts_->layer.forward(saved.x_norm, {saved.chosen, saved.weights},
                            weights.matrix(layout_.experts_in), weights.matrix(layout_.experts_out),
                            experts_->routed, *saved.experts);
  }
}

void Branch::norm_backward(const Tensor& x, const Tensor& d_x_norm, const BranchActivations& saved,
                           const Tensor& dx, const Tensor& dnorm, bool is_last) {
  rms_norm_backward(context_.exec, x, view().norm(layout_), saved.inverse_rms, d_x_norm, dx, dnorm,
                    context_.norm_partial_sums,
                    is_last && context_.rounds_gradient() ? *context_.rounded_gradient : Tensor());
}

void Branch::products_backward(const Tensor& dy, const BranchActivations& saved, bool is_split) {
  const Weights& weights = context_.weights;
  const ModelLayout& l = context_.layout;
  BranchProducts& p = *products_;
  const Tensor& dhidden = is_split ? saved.weight_pass->dhidden : p.dhidden;
  p.out_dgrad.run(dy, weights.matrix(layout_.out).transposed(), p.d_act);
  context_.run_between_operators();
  if (is_split) copy(context_.exec, p.out_dgrad.gathered(), saved.weight_pass->dy);

  const HiddenViews h = split_hidden(l, layout_, saved.hidden);
  const HiddenViews dh = split_hidden(l, layout_, dhidden);
  const InnerViews inner = split_inner(l, layout_, saved.inner);
  const InnerViews d_act = split_inner(l, layout_, p.d_act);
  if (layout_.attention) {
    p.attention->backward(context_.exec, h.q, h.k, h.v, inner.attention, saved.log_sums,
                          d_act.attention, dh.q, dh.k, dh.v,
                          {layout_.window, saved.document_starts});
    qk_norm_backward(saved, dh);
    add_bias_gradient(dh.qkv);
  }
  if (layout_.has_shared_gate) {
    gate_rows_backward(context_.exec, h.shared_gate, inner.mlp, d_act.mlp, dh.shared_gate);
  }
  if (layout_.mlp) swiglu_backward(context_.exec, h.gate, h.up, d_act.mlp, dh.gate, dh.up);
  context_.run_between_operators();
  p.in_dgrad.run(dhidden, weights.matrix(layout_.in).transposed(), p.d_x_norm);
  context_.run_between_operators();
  if (!is_split) add_weight_gradients(p.out_dgrad.gathered(), dhidden, saved);
}

void Branch::qk_norm_backward(const BranchActivations& saved, const HiddenViews& dhidden) {
  if (layout_.q_norm < 0) return;
  const int64_t head_dim = context_.config.head_dim;
  const Tensor& sums = products_->d_qk_norm;
  clear(context_.exec, sums);
  const auto [q, k] = split_unnormalized(context_.layout, saved.unnormalized);
  const auto backward = [&](const Tensor& rows, const Tensor& drows, int64_t begin) {
    rms_norm_heads_backward(context_.exec, rows,
                            context_.weights.vector(layout_.q_norm + begin, head_dim),
                            context_.config.norm_eps, drows, columns(sums, begin, head_dim));
  };
  backward(q, dhidden.q, 0);
  backward(k, dhidden.k, head_dim);
  context_.sum_gradient(sums, {layout_.q_norm, 1, 2 * head_dim});  // each rank has its heads
}

void Branch::add_bias_gradient(const Tensor& dqkv) {
  if (layout_.qkv_bias < 0) return;
  const bool adds = context_.adds_gradient(layout_.qkv_bias);
  column_sums(context_.exec, dqkv, context_.gradients.at(layout_.qkv_bias, dqkv.dim(1)), adds);
}

void Branch::backward_weight(const BranchActivations& saved) {
  if (!products_) return;
  const WeightPass& pass = *saved.weight_pass;
  add_weight_gradients(pass.dy, pass.dhidden, saved);
}

void Branch::add_weight_gradients(const Tensor& dy, const Tensor& dhidden,
                                  const BranchActivations& saved) {
  gemm(context_.exec, dy.transposed(), saved.inner, context_.gradient(layout_.out),
       {.accumulate = context_.adds_gradient(layout_.out.offset)});
  context_.run_between_operators();
  add_in_gradient(dhidden, saved);
}

void Branch::add_in_gradient(const Tensor& dhidden, const BranchActivations& saved) {
  const auto write = [&] {
    context_.write_weight_gradient(products_->in_wgrad, saved.x_norm, dhidden, layout_.in);
  };
  const Tensor& before = products_->d_gate_before;
  if (before.elements() == 0) return write();
  // Each rank has the gate's gradient of its columns: only that of this pass is summed.
  const Tensor gate = context_.gradient_to_add(layout_.in).rows(layout_.in.rows - 1, 1);
  copy(context_.exec, gate, before);
  clear(context_.exec, gate);
  write();
  all_reduce(context_.tp, gate);
  add(context_.exec, gate, before, gate);
}

void Branch::experts_backward(const Tensor& dy, const BranchActivations& saved,
                              const Tensor& balance) {
  const Weights& weights = context_.weights;
  BranchExperts& e = *experts_;
  e.layer.backward(dy, weights.matrix(layout_.experts_in), weights.matrix(layout_.experts_out),
                   *saved.experts, e.d_x_norm, e.dweights,
                   context_.gradient_to_add(layout_.experts_in),
                   context_.gradient_to_add(layout_.experts_out));
  router_backward(saved, balance);
}

void Branch::router_backward(const BranchActivations& saved, const Tensor& balance) {
  BranchExperts& e = *experts_;
  route_backward(context_.exec, saved.scores, saved.chosen, e.dweights, balance,
                 router_options(context_.config), e.dlogits);
  gemm(context_.exec, e.dlogits, context_.weights.router(layout_.router), e.d_x_norm,
       {.accumulate = true});
  if (layout_.router_bias >= 0) {  // has no gradient, and its memory may hold other values
    context_.gradient_to_add({layout_.router_bias, 1, context_.config.experts});
  }
  const Tensor input = router_input(context_.exec, saved.x_norm, e.x_norm);
  if (context_.tp.size() == 1) {
    const bool adds = context_.adds_gradient(layout_.router.offset);
    return gemm(context_.exec, e.dlogits->transposed(), input, context_.gradient(layout_.router),
                {.accumulate = adds});
  }
  gemm(context_.exec, e.dlogits->transposed(), input, e.drouter);
  context_.sum_gradient(e.drouter, layout_.router);  // each rank saw only its rows of the stream
}

}  // namespace tandem
