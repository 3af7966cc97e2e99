// SwiGLU of GPT-OSS's experts, on CPUs: gate' = min(gate, limit), up' = clamp(up, -limit, limit),
// out = (up' + 1) * gate' / (1 + e^(-alpha gate')). Rows may be strided; all operands share one
// dtype, f32 or bf16.
#pragma once

#include "tandem/tensor.h"

namespace tandem {

struct SwigluClamp {
  float limit = 0;  ///< above 0
  float alpha = 1;
};

void clamped_swiglu_forward(const SwigluClamp& clamp, const Tensor& gate, const Tensor& up,
                            const Tensor& out);
/// A clamped operand has no gradient beyond its limit.
void clamped_swiglu_backward(const SwigluClamp& clamp, const Tensor& gate, const Tensor& up,
                             const Tensor& dout, const Tensor& dgate, const Tensor& dup);

}  // namespace tandem
