// Soft cap of logits: cap x tanh(x / cap), arXiv 2408.00118, 2. On CPUs.
#pragma once

#include "core/exec.h"

namespace tandem {

/// Replaces x, f32 [rows, columns], by its capped elements.
void softcap_forward(const Exec& exec, const Tensor& x, double cap);

/// Replaces dx, f32 or bf16, the gradient of `capped`, f32, by that of the elements before the cap.
void softcap_backward(const Exec& exec, const Tensor& capped, double cap, const Tensor& dx);

}  // namespace tandem
