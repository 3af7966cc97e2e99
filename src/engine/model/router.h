// Routing of rows to experts, in training and generation.
#pragma once

#include <optional>

#include "engine/model/layer.h"
#include "kernels/router.h"
#include "overlap/moe/activation.h"
#include "tandem/moe.h"

namespace tandem {

RouterOptions router_options(const ModelConfig& config);
MoeOptions moe_options(const OverlapOptions& overlap, const CodecPolicy& codec);

/// Biases of a rank's gate and up projections, [local experts, 2 ffn]; without dimensions: none.
Tensor expert_biases(const LayerView& view, const BranchLayout& branch);
/// Biases of all experts' results, [experts, hidden]; without dimensions: none.
Tensor expert_out_biases(const LayerView& view, const BranchLayout& branch);
/// Activation of the model's experts, without tensors; nothing for SwiGLU without biases.
std::optional<MoeActivation> expert_activation(const ModelConfig& config);

/// Router output for some rows.
struct RouterMemory {
  Tensor logits, scores;   ///< f32 [rows, experts]
  Tensor chosen, weights;  ///< i32 and f32 [rows, top_k]
};

/// Returns `x_norm` if it is f32, else its rows cast to f32 in `scratch`. Routers compute in f32: a
/// choice changed by bf16 would make the loss jump.
Tensor router_input(const Exec& exec, const Tensor& x_norm, const Tensor& scratch);

/// Routes the rows of `input`, f32. `tokens`: as route_forward's.
void route(const LayerView& view, const BranchLayout& branch, const Tensor& input,
           const RouterMemory& memory, const Tensor& tokens = {});

}  // namespace tandem
