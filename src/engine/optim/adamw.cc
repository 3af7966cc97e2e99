#include "engine/optim/adamw.h"

#include <cmath>

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

}  // namespace tandem
