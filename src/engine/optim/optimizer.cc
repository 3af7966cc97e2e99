#include "engine/optim/optimizer.h"

#include <fmt/format.h>

#include <cmath>

#include "tandem/error.h"

namespace tandem {
namespace {

void update_adamw(const Exec& exec, const AdamStep& step, bool decay, double /*trust_ratio*/,
                  const AdamState& state, const Tensor& gradient, const Tensor& working) {
  adamw(exec, step, decay, state, gradient, working);
}

/// LAMB (You et al., arXiv 1904.00962, algorithm 2): each tensor's AdamW direction, with its decay,
/// is scaled by the trust ratio.
void update_lamb(const Exec& exec, const AdamStep& step, bool /*decay*/, double trust_ratio,
                 const AdamState& state, const Tensor& direction, const Tensor& working) {
  lamb_update(exec, float(double(step.lr) * trust_ratio), state.w, direction, working);
}

constexpr Optimizer kOptimizers[] = {{"adamw", update_adamw},
                                     {"lamb", update_lamb, lamb_direction}};

}  // namespace

std::span<const Optimizer> optimizers() {
  return kOptimizers;
}

const Optimizer& find_optimizer(std::string_view name) {
  for (const Optimizer& each : optimizers()) {
    if (each.name == name) return each;
  }
  throw ConfigError(fmt::format("optimizer.name is {}: not known", name));
}

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

}  // namespace tandem
