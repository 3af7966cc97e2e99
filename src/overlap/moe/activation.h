// Experts with biases and another activation than SwiGLU, on CPU ranks. Biases of their results are
// not the layer's: sums over a row's experts need no dispatch (kernels/moe.h).
#pragma once

#include "kernels/clamped_swiglu.h"

namespace tandem {

/// Outlives the layer (MoeOptions::activation). The owner sets the tensors before a pass.
struct MoeActivation {
  SwigluClamp clamp;  ///< limit 0: SwiGLU
  /// Biases of w_in's rows, f32 [local experts, 2 x ffn shard]; without dimensions: none.
  Tensor bias = {};
  /// Gradient of `bias`, f32, which a backward pass replaces.
  Tensor d_bias = {};

  /// Adds the bias to rows [gate | up] and activates them.
  void forward(int expert, const Tensor& gate_up, const Tensor& out) const;
  /// Activates rows that include the bias.
  void again(const Tensor& gate_up, const Tensor& out) const;
  void backward(const Tensor& gate_up, const Tensor& d_out, const Tensor& d_gate_up) const;
  /// Gradient of an expert's bias from that of its rows [gate | up], of which there may be none.
  void bias_backward(int expert, const Tensor& d_gate_up) const;
};

}  // namespace tandem
