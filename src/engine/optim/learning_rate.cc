#include "engine/optim/learning_rate.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <string>

namespace tandem {

double learning_rate(const TrainConfig& config, int64_t step, double elapsed_s, double warmup_s) {
  const auto& o = config.optimizer;
  if (step < o.warmup) return o.lr * double(step + 1) / double(o.warmup);
  if (o.schedule == "constant") return o.lr;
  if (o.schedule == "inverse-sqrt") {
    const double ratio =
        double(std::max<int64_t>(o.warmup, 1)) / double(std::max<int64_t>(step, 1));
    return std::max(o.min_lr, o.lr * std::sqrt(ratio));
  }
  const double seconds = config.train.seconds;
  const double done = seconds > 0 ? elapsed_s - warmup_s : double(step - o.warmup);
  const double all = seconds > 0 ? seconds - warmup_s : double(config.train.steps - o.warmup);
  const double progress = all > 0 ? std::clamp(done / all, 0.0, 1.0) : 1;
  const bool is_wsd = o.schedule == "wsd";
  const std::string& shape = is_wsd ? o.decay_type : o.schedule;
  const double left = std::min(1.0, (1 - progress) / (is_wsd ? o.decay_fraction : 1));
  if (shape == "linear") return o.min_lr + (o.lr - o.min_lr) * left;
  if (shape == "1-sqrt") return o.min_lr + (o.lr - o.min_lr) * (1 - std::sqrt(1 - left));
  const double decayed = is_wsd ? 1 - left : progress;
  return o.min_lr + (o.lr - o.min_lr) * (1 + std::cos(std::numbers::pi * decayed)) / 2;
}

}  // namespace tandem
