// AdamW (Loshchilov & Hutter, arXiv 1711.05101, algorithm 2).
#pragma once

#include <cstdint>

#include "core/exec.h"
#include "engine/optim/config.h"
#include "tandem/tensor.h"

namespace tandem {

/// Constants of one step.
struct AdamStep {
  float lr = 0, beta1 = 0, beta2 = 0, eps = 0, weight_decay = 0;
  float correction1 = 1, correction2 = 1;  ///< 1 / (1 - beta^step)
  float gradient_scale = 1;                ///< clipping

  /// `step` counts from 0.
  static AdamStep make(const OptimizerConfig& config, int64_t step, double lr,
                       double gradient_norm);
};

/// Weights and both moments.
struct AdamState {
  Tensor w, m, v;
};

/// Updates the state in place; applies weight decay only if `decay`. All f32, contiguous and of one
/// size. `working`: bf16 copy of the weights that is updated with them; without data if there is
/// none.
void adamw(const Exec& exec, const AdamStep& step, bool decay, const AdamState& state,
           const Tensor& gradient, const Tensor& working = {});

}  // namespace tandem
