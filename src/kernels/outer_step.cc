#include "kernels/outer_step.h"

#include <cmath>
#include <span>

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

void scale(const Exec& exec, const Tensor& values, float factor, const Tensor& scaled) {
  if (exec.on_gpu()) return gpu::scale(exec.stream, values, factor, scaled);
  const auto* const from = values.as<const float>();
  auto* const to = scaled.as<float>();
  for (int64_t i = 0; i < scaled.elements(); ++i) to[i] = factor * from[i];
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

void take_signs(const Exec& exec, const Tensor& values) {
  if (exec.on_gpu()) return gpu::take_signs(exec.stream, values);
  for (float& value : std::span(values.as<float>(), size_t(values.elements()))) {
    if (!std::isnan(value)) value = float(value > 0) - float(value < 0);
  }
}

void step_along(const Exec& exec, const Tensor& direction, float rate, const Tensor& weights) {
  if (exec.on_gpu()) return gpu::step_along(exec.stream, direction, rate, weights);
  const auto* const along = direction.as<const float>();
  auto* const to = weights.as<float>();
  for (int64_t i = 0; i < weights.elements(); ++i) to[i] -= rate * along[i];
}

}  // namespace tandem
