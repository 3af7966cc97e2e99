#include "kernels/outer_step.h"

#include "kernels/cuda/optimizer/outer_step.h"

namespace tandem {

void subtract(const Exec& exec, const Tensor& x, const Tensor& y, const Tensor& difference) {
  if (exec.on_gpu()) return gpu::subtract(exec.stream, x, y, difference);
  const auto *const from = x.as<const float>(), *const less = y.as<const float>();
  auto* const to = difference.as<float>();
  for (int64_t i = 0; i < difference.elements(); ++i) to[i] = from[i] - less[i];
}

void divide(const Exec& exec, const Tensor& values, float divisor) {
  if (exec.on_gpu()) return gpu::divide(exec.stream, values, divisor);
  auto* const to = values.as<float>();
  for (int64_t i = 0; i < values.elements(); ++i) to[i] /= divisor;
}

void outer_step(const Exec& exec, const OuterConstants& step, const Tensor& mean,
                const OuterState& state) {
  if (exec.on_gpu()) return gpu::outer_step(exec.stream, step, mean, state);
  const auto* const means = mean.as<const float>();
  auto *const weights = state.weights.as<float>(), *const anchor = state.anchor.as<float>();
  float* const velocity = state.velocity.data() ? state.velocity.as<float>() : nullptr;
  for (int64_t i = 0; i < mean.elements(); ++i) {
    float outer = means[i];
    if (velocity) {
      velocity[i] = step.momentum * velocity[i] + means[i];
      outer = step.nesterov ? means[i] + step.momentum * velocity[i] : velocity[i];
    }
    anchor[i] -= step.lr * outer;
    weights[i] = step.mix == 0 ? anchor[i] : step.mix * weights[i] + (1 - step.mix) * anchor[i];
  }
}

}  // namespace tandem
