#include "engine/model/router.h"

#include "gemm/gemm.h"
#include "kernels/elementwise.h"
#include "kernels/row_ops.h"

namespace tandem {

RouterOptions router_options(const ModelConfig& config) {
  return {int(config.top_k), config.router == "sigmoid", config.normalize_top_k,
          float(config.route_scale)};
}

MoeOptions moe_options(const OverlapOptions& overlap, const CodecPolicy& codec) {
  return {overlap.strategy, overlap.chunks, codec.experts, codec.experts};
}

namespace {

/// f32 weights as a matrix.
Tensor exact_matrix(const LayerView& view, const WeightMatrix& m) {
  const Tensor flat = view.weights.vector(m.offset, m.rows * m.columns);
  return Tensor(flat.data(), DType::f32, {m.rows, m.columns}, flat.device());
}

}  // namespace

Tensor expert_biases(const LayerView& view, const BranchLayout& branch) {
  return branch.experts_bias.rows > 0 ? exact_matrix(view, branch.experts_bias) : Tensor();
}

Tensor expert_out_biases(const LayerView& view, const BranchLayout& branch) {
  const program::Op* const op = branch.program.find(program::kExpertBias);
  if (!op) return {};
  return exact_matrix(view, {branch.offset(*op), view.config.experts, view.config.hidden});
}

std::optional<MoeActivation> expert_activation(const ModelConfig& c) {
  if (c.swiglu_limit == 0 && !c.expert_bias) return {};
  return MoeActivation{.clamp = {float(c.swiglu_limit), float(c.swiglu_alpha)}};
}

Tensor router_input(const Exec& exec, const Tensor& x_norm, const Tensor& scratch) {
  if (x_norm.dtype() == DType::f32) return x_norm;
  const Tensor input = scratch.rows(0, x_norm.dim(0));
  cast(exec, x_norm, input);
  return input;
}

void route(const LayerView& view, const BranchLayout& branch, const Tensor& input,
           const RouterMemory& memory, const Tensor& tokens) {
  Tensor bias;
  if (branch.router_bias >= 0) bias = view.weights.vector(branch.router_bias, view.config.experts);
  gemm(view.exec, input, view.weights.router(branch.router).transposed(), memory.logits);
  if (const program::Op* const logit_bias = branch.program.find(program::kRouterBias)) {
    add_bias(view.exec, view.weights.vector(branch.offset(*logit_bias), view.config.experts),
             memory.logits);
  }
  route_forward(view.exec, memory.logits, bias, router_options(view.config), memory.scores,
                memory.chosen, memory.weights, tokens);
}

}  // namespace tandem
