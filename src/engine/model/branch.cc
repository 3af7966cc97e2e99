#include "engine/model/branch.h"

#include <vector>

#include "comm/exec.h"
#include "engine/model/router.h"
#include "engine/model/stage_placements.h"
#include "gemm/gemm.h"
#include "kernels/elementwise.h"
#include "kernels/moe.h"
#include "kernels/norm.h"
#include "kernels/row_ops.h"
#include "observe/recorder.h"
#include "tandem/collectives.h"

namespace tandem {
namespace {

ExpertCoordinates expert_coordinates(const Communicator& experts, const Communicator& tp) {
  return {experts.size() / tp.size(), experts.rank() / tp.size()};
}

schedule::ContextRows find_rows(const TransformerOptions& options) {
  const Communicator* const context = options.context;
  return schedule::context_rows(options.seq, context ? context->size() : 1,
                                context ? context->rank() : 0);
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
      gradients(exec, assign_gradients(layout, config, options.gradient_window),
                options.gradient_dtype),
      sequence_rows(find_rows(options)),
      tokens(options.batch * sequence_rows.count()),
      quantized(options.fp8 ? std::make_unique<QuantizedOperands>(
                                  exec, layout, tokens, quantizes_weight_gradients(),
                                  options.fp8_experts, options.fp8_scales)
                            : nullptr),
      expert_quantization{[this](const Tensor& weight, bool is_transposed) {
                            const int64_t offset = weights.offset_of(weight);
                            return quantized->experts(offset, weight, is_transposed);
                          },
                          options.fp8_scales},
      local_rows(shard_of(tokens, tp.size(), tp.rank())),
      rope(exec, options.seq, config),
      norm_partial_sums(make(
          DType::f32, rms_norm_partial_sums(exec, local_rows.count, config.hidden), config.hidden)),
      rounded_gradient(
          make(options.dtype, rounds_gradient() ? local_rows.count : 0, config.hidden)),
      gradient_sum(options.gradient_dtype == DType::f32
                       ? 0
                       : gradient_sum_bytes(layout, config, tp.size(), options.head_rows > 0),
                   exec.device),
      recomputed(std::make_unique<RecomputedActivations>(*this)) {
  PlacementTable placements;  // throws if an operator of the stage cannot consume a tensor
  declare_stage(config, layout, layers, placements);
  set_exec(experts, exec);
}

std::span<const int32_t> ModelContext::take_rows(std::span<const int32_t> of_sequences) {
  if (!options.context || of_sequences.empty()) return of_sequences;
  taken_rows.clear();
  for (int64_t sequence = 0; sequence < options.batch; ++sequence) {
    for (int64_t row = 0; row < sequence_rows.count(); ++row) {
      taken_rows.push_back(
          of_sequences[size_t(sequence * options.seq + sequence_rows.position(row))]);
    }
  }
  return taken_rows;
}

ModelLayout ModelContext::whole_layout() const {
  return {config, tp.size(), tp.rank(), expert_coordinates(experts, tp)};
}

Tensor ModelContext::gradient(const WeightMatrix& m) const {
  const Tensor flat = gradients.at(m.offset, m.rows * m.columns);
  return Tensor(flat.data(), flat.dtype(), {m.rows, m.columns}, flat.device());
}

Tensor ModelContext::gradient_to_add(const WeightMatrix& m) {
  const Tensor result = gradient(m);
  if (!adds_gradient(m.offset)) clear(exec, result);
  return result;
}

void ModelContext::write_gradient(
    const WeightMatrix& m, const std::function<void(const Tensor& values, bool adds)>& write) {
  const bool adds = adds_gradient(m.offset);
  const Tensor written = gradient(m);
  if (written.dtype() == DType::f32) return write(written, adds);
  const Tensor values = gradient_sum.view(DType::f32, {m.rows, m.columns});
  if (adds) cast(exec, written, values);
  write(values, adds);
  cast(exec, values, written);
}

void ModelContext::add_gradient(const Tensor& term, const WeightMatrix& m) {
  write_gradient(m, [&](const Tensor& values, bool adds) {
    adds ? add(exec, values, term, values) : copy(exec, term, values);
  });
}

void ModelContext::sum_gradient(const Tensor& term, const WeightMatrix& m) {
  all_reduce(tp, term);
  add_gradient(term, m);
}

void ModelContext::write_weight_gradient(std::optional<AgWgrad>& wgrad, const Tensor& x,
                                         const Tensor& dy, const WeightMatrix& m) {
  const auto write = [&](const Tensor& values, bool adds) {
    multiply_gradient(wgrad, x, dy, values, adds);
  };
  wgrad ? write_gradient(m, write) : write(gradient(m), adds_gradient(m.offset));
}

void ModelContext::multiply_gradient(std::optional<AgWgrad>& wgrad, const Tensor& x,
                                     const Tensor& dy, const Tensor& values, bool adds) {
  if (wgrad) return wgrad->run(x, dy, values, adds);
  const ScopedLabel label("ag_wgrad", -1);
  gemm(exec, dy.transposed(), x, values, {.accumulate = adds});
}

bool ModelContext::write_quantized_gradient(const Tensor& x, const Tensor& dy,
                                            const WeightMatrix& m) {
  if (!quantizes_weight_gradients()) return false;
  const ScopedLabel label("ag_wgrad", -1);
  quantized->write_weight_gradient(dy, x, gradient(m), adds_gradient(m.offset));
  return true;
}

std::unique_ptr<MicrobatchState> make_state(const ModelContext& c, BranchExperts* experts,
                                            bool owns_input) {
  auto state = std::make_unique<MicrobatchState>(c, owns_input);
  if (experts) experts->prepare(state->branches);
  return state;
}

Branch::Branch(ModelContext& c, BranchProducts* products, BranchExperts* experts,
               const BranchLayout& l)
    : context_(c), products_(products), experts_(experts), layout_(l) {}

LayerView Branch::view() const {
  return {context_.config, context_.layout, context_.weights, context_.exec};
}

/// Operations in training: the residual stream is row-sharded over the ranks; activations are saved
/// for backward.
struct Branch::Run final : program::Runner {
  Run(const Branch& b, const BranchActivations& saved_, const Tensor& x_)
      : context(b.context_), products(b.products_), moe(b.experts_), saved(saved_), x(x_) {}

  ModelContext& context;
  BranchProducts* products;
  BranchExperts* moe;
  const BranchActivations& saved;
  Tensor x;
  // Forward; y without dimensions: no result.
  Tensor y = {}, scores = {};
  ExpertLoad* load = nullptr;
  std::optional<NextNorm> next = {};
  bool again = false;                    ///< recomputes unsaved activations
  std::function<void()> meanwhile = {};  ///< shared expert's operations, while rows are sent
  // Backward.
  Tensor dx = {}, d_sum = {}, dnorm = {}, balance = {};
  bool is_split = false;

  void forward(const program::Op& op, const program::Frame& f) override {
    if (op.row == &program::kColumnGemm) {
      products->in.run(f.at(program::kXNorm), f.branch.in, f.at(program::kHidden));
      context.run_between_operators();
    }
    if (op.row == &program::kAttention) attend(op, f);
    if (op.row == &program::kRowGemm && (y.dims() > 0 || f.branch.program.saves_sum())) {
      products->out.run(f.at(program::kInner), f.branch.out, products->residual);
      program::finish_sum(f.view, f.branch, f.values, products->residual);
      if (y.dims() == 0) return;
      moe ? add(context.exec, x, products->residual, y) : add_last(x, products->residual);
    }
    if (op.row == &program::kRouter) {
      scores = f.at(op.out[0]);
      route(f.view, f.branch, router_input(context.exec, f.at(program::kXNorm), moe->x_norm),
            {moe->logits, scores, f.at(op.out[1]), f.at(op.out[2])}, saved.padded_tokens);
    }
    if (op.row == &program::kExperts) run_experts(op, f);
  }
  void sum_over_ranks(const Tensor& terms) override { all_reduce(context.tp, terms); }
  void attend(const program::Op& op, const program::Frame& f) {
    const Tensor &q = f.at(op.in[0]), &k = f.at(op.in[1]), &v = f.at(op.in[2]),
                 &out = f.at(op.out[0]);
    products->attention->forward({q, k, v, out, log_sums(op), mask(op)}, f.branch, op, again);
    if (!again) context.run_between_operators();
  }
  void attend_backward(const program::Op& op, const program::BackwardFrame& f) {
    const program::ValueId q = op.in[0], k = op.in[1], v = op.in[2], out = op.out[0];
    products->attention->backward(
        {f.at(q), f.at(k), f.at(v), f.at(out), log_sums(op), f.gradient(out), f.gradient(q),
         f.gradient(k), f.gradient(v), mask(op)},
        f.branch, op);
  }
  void run_experts(const program::Op& op, const program::Frame& f) {
    const Tensor& chosen = f.at(op.in[1]);
    if (moe->activation) moe->activation->bias = expert_biases(f.view, f.branch);
    moe->layer.forward(f.at(op.in[0]), {chosen, f.at(op.in[2])}, f.view.weight(f.branch.experts_in),
                       f.view.weight(f.branch.experts_out), moe->routed, *saved.experts, meanwhile);
    if (load) load->add(f.branch.moe_layer, scores, chosen);
    if (y.dims() > 0) add_last(with_biases(op, f), moe->routed);
  }
  /// Residual stream before the experts' results, with the biases of the rows' experts, if any.
  Tensor with_biases(const program::Op& op, const program::Frame& f) {
    const Tensor& sum = products ? y : x;
    const Tensor biases = expert_out_biases(f.view, f.branch);
    if (biases.dims() == 0) return sum;
    add_expert_biases(sum, f.at(op.in[1]), f.at(op.in[2]), biases, y);
    return y;
  }
  void add_last(const Tensor& sum, const Tensor& added) {
    if (!next) return add(context.exec, sum, added, y);
    add_rms_norm_forward(context.exec, sum, added, next->weight, context.config.stream_eps(), y,
                         next->x_norm, next->inverse_rms);
  }
  AttentionMask mask(const program::Op& op) const { return {op.window, saved.document_starts}; }
  /// f32 [batch x heads, rows of a sequence]
  Tensor log_sums(const program::Op& op) const {
    const Tensor& sums = saved.values[size_t(op.out[1])];
    const int64_t sequences = context.options.batch * context.layout.heads;
    return Tensor(sums.data(), DType::f32, {sequences, sums.elements() / sequences}, sums.device());
  }

  program::Values make_gradients(const BranchLayout& branch) const {
    program::Values gradients;
    if (!products) return gradients;
    gradients[program::kXNorm] = products->d_x_norm;
    gradients[program::kHidden] = is_split ? saved.weight_pass->dhidden : products->dhidden;
    gradients[program::kInner] = products->d_act;
    program::set_ranges(branch, gradients);
    return gradients;
  }
  /// Gradient of the branch's result as GEMMs read it, before operations on the sum.
  const Tensor& dy() const { return d_sum.dims() > 0 ? d_sum : context.rounded(dx); }
  /// Memory of the gradient that operations on the sum replace.
  Tensor begin_sum_gradient() {
    d_sum = products->residual;
    cast(context.exec, dx, d_sum);
    return d_sum;
  }
  const Weights& weights() const { return context.weights; }

  void backward(const program::Op& op, const program::BackwardFrame& f) override {
    if (op.row == &program::kExperts) experts_backward(f);
    if (op.row == &program::kExpertBias) {
      add_expert_biases_backward(dy(), f.at(op.in[0]), f.at(op.in[1]),
                                 expert_out_biases(f.view, f.branch), moe->dweights, moe->drouter);
      context.sum_gradient(moe->drouter,
                           {f.branch.offset(op), moe->drouter->dim(0), moe->drouter->dim(1)});
    }
    if (op.row == &program::kRouter) router_backward(op, f);
    if (op.row == &program::kRouterBias) router_bias_backward(op, f);
    if (op.row == &program::kRowGemm) {
      products->out_dgrad.run(dy(), f.branch.out, products->d_act);
      context.run_between_operators();
      if (is_split) copy(context.exec, products->out_dgrad.gathered(), saved.weight_pass->dy);
    }
    if (op.row == &program::kAttention) attend_backward(op, f);
    if (op.row == &program::kColumnGemm) {
      context.run_between_operators();
      products->in_dgrad.run(f.gradient(program::kHidden), f.branch.in, products->d_x_norm);
      context.run_between_operators();
    }
    if (op.row != &program::kRmsNorm && op.row != &program::kRoundStream) return;
    if (products) norm_backward(f, products->d_x_norm, !moe);
    if (moe) norm_backward(f, moe->d_x_norm, true);
  }
  /// dx += gradient through the norm, if any, and rounded if that is the branch's last addition.
  void norm_backward(const program::BackwardFrame& f, const Tensor& d_x_norm, bool is_last) {
    rms_norm_backward(context.exec, x, f.view.norm(f.branch), f.at(program::kInverseRms), d_x_norm,
                      dx, dnorm, context.norm_partial_sums,
                      is_last && context.rounds_gradient() ? *context.rounded_gradient : Tensor());
  }
  void experts_backward(const program::BackwardFrame& f) {
    const WeightMatrix &in = f.branch.experts_in, &out = f.branch.experts_out;
    if (moe->activation) {
      moe->activation->bias = expert_biases(f.view, f.branch);
      moe->activation->d_bias = moe->d_bias;
    }
    moe->layer.backward(dy(), weights().matrix(in), weights().matrix(out), *saved.experts,
                        moe->d_x_norm, moe->dweights, context.gradient(in), context.gradient(out),
                        context.begin_experts(f.branch), meanwhile);
    if (f.branch.experts_bias.rows > 0) context.add_gradient(moe->d_bias, f.branch.experts_bias);
  }
  void router_bias_backward(const program::Op& op, const program::BackwardFrame& f) {
    const int64_t experts = context.config.experts;
    const Tensor term(moe->drouter->data(), DType::f32, {1, experts}, context.exec.device);
    column_sums(context.exec, moe->dlogits,
                Tensor(term.data(), DType::f32, {experts}, context.exec.device), false);
    context.sum_gradient(term, {f.branch.offset(op), 1, experts});
  }
  void router_backward(const program::Op& op, const program::BackwardFrame& f) {
    const WeightMatrix& router = f.branch.router;
    route_backward(context.exec, f.at(op.out[0]), f.at(op.out[1]), moe->dweights, balance,
                   router_options(context.config), moe->dlogits);
    gemm(context.exec, moe->dlogits, weights().router(router), moe->d_x_norm, {.accumulate = true});
    if (f.branch.router_bias >= 0) {  // has no gradient, and its memory may hold other values
      context.gradient_to_add({f.branch.router_bias, 1, context.config.experts});
    }
    const Tensor input = router_input(context.exec, f.at(program::kXNorm), moe->x_norm);
    if (context.tp.size() == 1) {
      return context.write_gradient(router, [&](const Tensor& values, bool adds) {
        gemm(context.exec, moe->dlogits->transposed(), input, values, {.accumulate = adds});
      });
    }
    gemm(context.exec, moe->dlogits->transposed(), input, moe->drouter);
    context.sum_gradient(moe->drouter, router);  // each rank saw only its rows of the stream
  }

  void backward_weight(const program::Op& op, const program::BackwardFrame& f) override {
    if (op.row == &program::kColumnGemm) return column_weight(f);
    const Tensor rows = is_split ? *saved.weight_pass->dy : products->out_dgrad.gathered();
    const Tensor& inner = f.at(program::kInner);
    if (!context.write_quantized_gradient(inner, rows, f.branch.out)) {
      gemm(context.exec, rows.transposed(), inner, context.gradient(f.branch.out),
           {.accumulate = context.adds_gradient(f.branch.out.offset)});
    }
    context.run_between_operators();
  }
  void column_weight(const program::BackwardFrame& f) {
    const WeightMatrix& in = f.branch.in;
    const Tensor &x_norm = f.at(program::kXNorm), &dhidden = f.gradient(program::kHidden);
    if (context.write_quantized_gradient(x_norm, dhidden, in)) return;
    const Tensor& before = products->d_whole_before;
    if (before.elements() == 0) {
      return context.write_weight_gradient(products->in_wgrad, x_norm, dhidden, in);
    }
    // Each rank has a term of the gradient of these rows: only that of this pass is summed.
    context.write_gradient(in, [&](const Tensor& values, bool adds) {
      const Tensor whole = values.rows(in.rows - before.dim(0), before.dim(0));
      if (adds) {
        copy(context.exec, whole, before);
        clear(context.exec, whole);
      }
      products->in_wgrad->run(x_norm, dhidden, values, adds);
      all_reduce(context.tp, whole);
      if (adds) add(context.exec, whole, before, whole);
    });
  }

  Tensor gradient(int64_t offset, int64_t count) override {
    return context.gradients.at(offset, count);
  }
  bool adds_gradient(int64_t offset) override { return context.adds_gradient(offset); }
  void sum_gradient(const Tensor& term, int64_t offset) override {
    context.sum_gradient(term, {offset, term.dim(0), term.dim(1)});
  }
};

NextNorm Branch::norm(const BranchActivations& saved) const {
  return {view().norm(layout_), saved.values[program::kXNorm], saved.values[program::kInverseRms]};
}

void Branch::normalize(const Tensor& x, const BranchActivations& saved) const {
  Run run(*this, saved, x);
  const LayerView model = view();
  program::Frame frame{model, layout_, saved.values, run, x};
  run_norm(frame);
}

void Branch::forward(const Tensor& x, const Tensor& y, const BranchActivations& saved,
                     ExpertLoad* load, const std::optional<NextNorm>& next) {
  Run run(*this, saved, x);
  run.y = y, run.load = load, run.next = next;
  const LayerView model = view();
  program::Frame frame{model, layout_, saved.values, run, x};
  overlaps_shared_expert() ? run_experts_first(frame, run.meanwhile) : run_normalized(frame);
}

// With tensor parallelism it is divided, and its sums would wait for a rank that refuses the
// experts' call.
bool Branch::overlaps_shared_expert() const {
  return products_ && experts_ && context_.tp.size() == 1 && !context_.exec.on_gpu();
}

void Branch::recompute_unsaved(const Tensor& x, const BranchActivations& saved) {
  Run run(*this, saved, x);
  run.again = true;
  const LayerView model = view();
  program::Frame frame{model, layout_, saved.values, run, x};
  run_unsaved(frame);
}

void Branch::backward(const Tensor& x, const Tensor& dx, const Tensor& dnorm,
                      const BranchActivations& saved, const Tensor& balance, bool is_split) {
  Run run(*this, saved, x);
  run.dx = dx, run.dnorm = dnorm, run.balance = balance, run.is_split = is_split;
  const LayerView model = view();
  const program::Values gradients = run.make_gradients(layout_);
  program::BackwardFrame frame{{model, layout_, saved.values, run, x}, gradients};
  if (layout_.program.finishes_sum()) frame.d_sum = run.begin_sum_gradient();
  run_backward(frame, is_split, overlaps_shared_expert() ? &run.meanwhile : nullptr);
}

void Branch::backward_weight(const BranchActivations& saved) {
  if (!products_) return;
  Run run(*this, saved, {});
  run.is_split = true;
  const LayerView model = view();
  const program::Values gradients = run.make_gradients(layout_);
  program::BackwardFrame frame{{model, layout_, saved.values, run}, gradients};
  run_backward_weight(frame);
}

}  // namespace tandem
