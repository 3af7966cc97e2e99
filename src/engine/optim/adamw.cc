#include "engine/optim/adamw.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace tandem {

AdamStep AdamStep::make(const TrainConfig& config, int64_t step, double lr, double gradient_norm) {
  const auto& o = config.optimizer;
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

void adamw(const AdamStep& step, bool decay, std::span<float> w, std::span<const float> gradient,
           std::span<float> m, std::span<float> v) {
  const AdamStep s = step;
  const float shrink = decay ? 1 - s.lr * s.weight_decay : 1;
  const auto count = int64_t(w.size());
  float* const wp = w.data();
  const float* const gp = gradient.data();
  float* const mp = m.data();
  float* const vp = v.data();
#pragma omp parallel for simd schedule(static) if (count > 65536)
  for (int64_t i = 0; i < count; ++i) {
    const float g = gp[i] * s.gradient_scale;
    mp[i] = s.beta1 * mp[i] + (1 - s.beta1) * g;
    vp[i] = s.beta2 * vp[i] + (1 - s.beta2) * g * g;
    wp[i] = shrink * wp[i] -
            s.lr * (mp[i] * s.correction1) / (std::sqrt(vp[i] * s.correction2) + s.eps);
  }
}

double sum_of_squares(std::span<const float> values) {
  constexpr size_t kLanes = 16;
  double lanes[kLanes] = {};
  size_t i = 0;
  for (; i + kLanes <= values.size(); i += kLanes) {
    for (size_t lane = 0; lane < kLanes; ++lane) {
      const double value = values[i + lane];
      lanes[lane] += value * value;
    }
  }
  double sum = 0;
  for (; i < values.size(); ++i) sum += double(values[i]) * double(values[i]);
  for (const double lane : lanes) sum += lane;
  return sum;
}

double learning_rate(const TrainConfig& config, int64_t step, double elapsed_s, double warmup_s) {
  const auto& o = config.optimizer;
  if (step < o.warmup) return o.lr * double(step + 1) / double(o.warmup);
  const double seconds = config.train.seconds;
  const double done = seconds > 0 ? elapsed_s - warmup_s : double(step - o.warmup);
  const double all = seconds > 0 ? seconds - warmup_s : double(config.train.steps - o.warmup);
  const double progress = all > 0 ? std::clamp(done / all, 0.0, 1.0) : 1;
  return o.min_lr + (o.lr - o.min_lr) * (1 + std::cos(std::numbers::pi * progress)) / 2;
}

}  // namespace tandem
