#include "engine/optim/lamb.h"

#include <cmath>

#include "engine/optim/cuda/kernels.h"
#include "kernels/elementwise.h"

namespace tandem {

void lamb_direction(const Exec& exec, const AdamStep& step, bool decay, const AdamState& state,
                    const Tensor& gradient) {
  const AdamStep s = step;
  const float weight_decay = decay ? s.weight_decay : 0;
  if (exec.on_gpu()) return gpu::lamb_direction(exec.stream, s, weight_decay, state, gradient);
  const int64_t count = state.w.elements();
  const float* const wp = state.w.as<const float>();
  float* const gp = gradient.as<float>();
  float* const mp = state.m.as<float>();
  float* const vp = state.v.as<float>();
#pragma omp parallel for simd schedule(static) if (count > 65536)
  for (int64_t i = 0; i < count; ++i) {
    const float g = gp[i] * s.gradient_scale;
    mp[i] = s.beta1 * mp[i] + (1 - s.beta1) * g;
    vp[i] = s.beta2 * vp[i] + (1 - s.beta2) * g * g;
    gp[i] =
        (mp[i] * s.correction1) / (std::sqrt(vp[i] * s.correction2) + s.eps) + weight_decay * wp[i];
  }
}

double trust_ratio(double weight_squares, double direction_squares) {
  if (weight_squares == 0 || direction_squares == 0) return 1;
  return std::sqrt(weight_squares / direction_squares);
}

void lamb_update(const Exec& exec, float rate, const Tensor& w, const Tensor& direction,
                 const Tensor& working) {
  if (exec.on_gpu()) return gpu::lamb_update(exec.stream, rate, w, direction, working);
  const int64_t count = w.elements();
  float* const wp = w.as<float>();
  const float* const up = direction.as<const float>();
#pragma omp parallel for simd schedule(static) if (count > 65536)
  for (int64_t i = 0; i < count; ++i) wp[i] -= rate * up[i];
  if (working.data()) cast(exec, w, working);
}

}  // namespace tandem
