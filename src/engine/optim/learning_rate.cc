#include "engine/optim/learning_rate.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <string>

namespace tandem {

double learning_rate(const OptimizerConfig& o, const RunConfig& train, int64_t step, double done,
                     double warmup) {
  if (step < o.warmup) return o.lr * double(step + 1) / double(o.warmup);
  if (o.schedule == "constant") return o.lr;
  if (o.schedule == "inverse-sqrt") {
    const double ratio =
        double(std::max<int64_t>(o.warmup, 1)) / double(std::max<int64_t>(step, 1));
    return std::max(o.min_lr, o.lr * std::sqrt(ratio));
  }
  const bool by_steps = train.ends_by_steps();
  const double length = train.seconds > 0 ? train.seconds : double(train.tokens);
  const double since_warmup = by_steps ? double(step - o.warmup) : done - warmup;
  const double all = by_steps ? double(train.steps - o.warmup) : length - warmup;
  const double progress = all > 0 ? std::clamp(since_warmup / all, 0.0, 1.0) : 1;
  const bool is_wsd = o.schedule == "wsd";
  const std::string& shape = is_wsd ? o.decay_type : o.schedule;
  const double left = std::min(1.0, (1 - progress) / (is_wsd ? o.decay_fraction : 1));
  if (shape == "linear") return o.min_lr + (o.lr - o.min_lr) * left;
  if (shape == "1-sqrt") return o.min_lr + (o.lr - o.min_lr) * (1 - std::sqrt(1 - left));
  const double decayed = is_wsd ? 1 - left : progress;
  return o.min_lr + (o.lr - o.min_lr) * (1 + std::cos(std::numbers::pi * decayed)) / 2;
}

}  // namespace tandem
