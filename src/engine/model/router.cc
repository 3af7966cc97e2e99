#include "engine/model/router.h"

#include "gemm/gemm.h"
#include "kernels/elementwise.h"

namespace tandem {

RouterOptions router_options(const ModelConfig& config) {
  return {int(config.top_k), config.router == "sigmoid", config.normalize_top_k,
          float(config.route_scale)};
}

MoeOptions moe_options(const OverlapOptions& overlap, const CodecPolicy& codec) {
  return {overlap.strategy, overlap.chunks, codec.experts, codec.experts};
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
  route_forward(view.exec, memory.logits, bias, router_options(view.config), memory.scores,
                memory.chosen, memory.weights, tokens);
}

}  // namespace tandem
