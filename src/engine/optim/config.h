// Table `optimizer`: update rule, learning rate and its schedule.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace tandem {

template <class S>
struct Key;  // engine/config/section.h

struct OptimizerConfig {
  std::string name = "adamw";
  double lr = 3e-3;
  double min_lr = 3e-4;
  std::string schedule = "cosine";
  double decay_fraction = 0.2;
  std::string decay_type = "linear";
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;
  int64_t warmup = 20;
  double grad_clip = 1;
  std::vector<std::string> no_decay;  ///< patterns
  std::vector<std::string> lr_scale;  ///< "PATTERN=NUMBER"

  static std::span<const Key<OptimizerConfig>> keys();
  /// Whether updates depend on norms of whole tensors (engine/optim/optimizer.h).
  bool uses_trust_ratios() const { return name == "lamb"; }
  void check() const;  ///< throws ConfigError if keys contradict each other
};

}  // namespace tandem
