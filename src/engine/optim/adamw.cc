#include "engine/optim/adamw.h"

#include <cmath>

#include "engine/optim/cuda/kernels.h"
#include "kernels/elementwise.h"

namespace tandem {

AdamStep AdamStep::make(const OptimizerConfig& o, int64_t step, double lr, double gradient_norm) {
  const double t = double(step) + 1;
  AdamStep s;
  s.lr = float(lr);
  s.beta1 = float(o.beta1);
  s.beta2 = float(o.beta2);
  s.eps = float(o.eps);
  s.weight_decay = float(o.weight_decay);
  s.correction1 = float(1 / (1 - std::pow(o.beta1, t)));
  s.correction2 = float(1 / (1 - std::pow(o.beta2, t)));
  s.gradient_scale =
      o.grad_clip > 0 && gradient_norm > o.grad_clip ? float(o.grad_clip / gradient_norm) : 1.0f;
  return s;
}

void adamw(const Exec& exec, const AdamStep& step, bool decay, const AdamState& state,
           const Tensor& gradient, const Tensor& working) {
  const float shrink = decay ? 1 - step.lr * step.weight_decay : 1;
  if (exec.on_gpu()) return gpu::adamw(exec.stream, step, shrink, state, gradient, working);
  const AdamStep s = step;
  const int64_t count = state.w.elements();
  float* const wp = state.w.as<float>();
  const float* const gp = gradient.as<float>();
  float* const mp = state.m.as<float>();
  float* const vp = state.v.as<float>();
#pragma omp parallel for simd schedule(static) if (count > 65536)
  for (int64_t i = 0; i < count; ++i) {
    const float g = gp[i] * s.gradient_scale;
    mp[i] = s.beta1 * mp[i] + (1 - s.beta1) * g;
    vp[i] = s.beta2 * vp[i] + (1 - s.beta2) * g * g;
    wp[i] = shrink * wp[i] -
            s.lr * (mp[i] * s.correction1) / (std::sqrt(vp[i] * s.correction2) + s.eps);
  }
  if (working.data()) cast(exec, state.w, working);
}

}  // namespace tandem
