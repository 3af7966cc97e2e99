// SwiGLU: out = silu(gate) * up, silu(g) = g / (1 + e^-g), and GEGLU with gelu(g) = g / 2 * (1 +
// tanh(sqrt(2 / pi) * (g + 0.044715 g^3))) in its place (arXiv 2002.05202). Rows may be strided
// (they are column ranges of wider activations); all operands share one dtype, f32 or bf16.
#pragma once

#include "core/exec.h"

namespace tandem {

void swiglu_forward(const Exec& exec, const Tensor& gate, const Tensor& up, const Tensor& out);
void swiglu_backward(const Exec& exec, const Tensor& gate, const Tensor& up, const Tensor& dout,
                     const Tensor& dgate, const Tensor& dup);
/// On CPUs, as its backward pass.
void geglu_forward(const Exec& exec, const Tensor& gate, const Tensor& up, const Tensor& out);
void geglu_backward(const Exec& exec, const Tensor& gate, const Tensor& up, const Tensor& dout,
                    const Tensor& dgate, const Tensor& dup);

}  // namespace tandem
