#include "engine/optim/config.h"

#include <fmt/format.h>

#include "engine/config/section.h"
#include "engine/model/config.h"
#include "tandem/error.h"

namespace tandem {
namespace {

constexpr Key<OptimizerConfig> kOptimizerKeys[] = {
    {"name", &OptimizerConfig::name, one_of("adamw", "lamb"),
     "lamb: AdamW's update of a tensor is scaled by the ratio of the norms of both"},
    {"lr", &OptimizerConfig::lr, Range(0, 1e3), "peak learning rate"},
    {"min_lr", &OptimizerConfig::min_lr, Range(0, 1e3),
     "learning rate at the end of a schedule that decays"},
    {"schedule", &OptimizerConfig::schedule,
     one_of("constant", "linear", "cosine", "wsd", "inverse-sqrt"),
     "learning rate after the warm-up"},
    {"decay_fraction", &OptimizerConfig::decay_fraction, Range(0.001, 1),
     "last part of the run after the warm-up, in which wsd decays"},
    {"decay_type", &OptimizerConfig::decay_type, one_of("linear", "cosine", "1-sqrt"),
     "how wsd decays"},
    {"beta1", &OptimizerConfig::beta1, Range(0, 0.999999), "first moment"},
    {"beta2", &OptimizerConfig::beta2, Range(0, 0.999999), "second moment"},
    {"eps", &OptimizerConfig::eps, Range(kMinEpsilon, 1), "added to the root of the second moment"},
    {"weight_decay", &OptimizerConfig::weight_decay, Range(0, 1e3), "decoupled, on matrices"},
    {"warmup", &OptimizerConfig::warmup, Range(0, kBig), "steps of linear warm-up"},
    {"grad_clip", &OptimizerConfig::grad_clip, Range(0, 1e9),
     "largest global gradient norm (0: off)"},
    {"no_decay", &OptimizerConfig::no_decay, kAny,
     "patterns of tensor names without weight decay, in addition to norms and routers' biases"},
    {"lr_scale", &OptimizerConfig::lr_scale, kAny,
     "factors of the learning rate by pattern: {\"*embed_tokens*\" = 0.5}, or strings "
     "\"*embed_tokens*=0.5\""},
};

}  // namespace

std::span<const Key<OptimizerConfig>> OptimizerConfig::keys() {
  return kOptimizerKeys;
}

void OptimizerConfig::check() const {
  if (schedule == "constant" || min_lr <= lr) return;
  throw ConfigError(
      fmt::format("optimizer.min_lr is {}: expected at most optimizer.lr = {}", min_lr, lr));
}

}  // namespace tandem
