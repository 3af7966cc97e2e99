// Elementwise updates of learners that exchange what they have learned
// (engine/parallel/sync/outer_sync.h). All tensors are contiguous and f32, of one size, on exec's
// device; every operation is rounded, so a GPU gives the bits of a CPU.
#pragma once

#include "core/exec.h"

namespace tandem {

/// difference = x - y.
void subtract(const Exec& exec, const Tensor& x, const Tensor& y, const Tensor& difference);
/// values /= divisor.
void divide(const Exec& exec, const Tensor& values, float divisor);
/// scaled = factor x values, which may be `scaled`.
void scale(const Exec& exec, const Tensor& values, float factor, const Tensor& scaled);

/// Constants of an outer step (DiLoCo, arXiv 2311.08105, algorithm 1).
struct OuterConstants {
  float lr = 0, momentum = 0;
  bool nesterov = false;
  float mix = 0;  ///< share of its weights that a learner keeps
};
/// A learner's weights, those of all learners, and the momentum, without data if it is 0.
struct OuterState {
  Tensor weights, anchor, velocity;
};
/// v = momentum x v + mean,  anchor -= lr x v, with Nesterov's momentum lr x (mean + momentum x v),
/// w = mix x w + (1 - mix) x anchor.
void outer_step(const Exec& exec, const OuterConstants& step, const Tensor& mean,
                const OuterState& state);

/// Replaces values by their signs: 1, -1 or 0; NaN stays.
void take_signs(const Exec& exec, const Tensor& values);
/// weights -= rate x direction.
void step_along(const Exec& exec, const Tensor& direction, float rate, const Tensor& weights);

}  // namespace tandem
