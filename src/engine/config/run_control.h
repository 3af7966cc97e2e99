// Keys that end a run or drop steps: train.tokens, train.early_stop, train.max_loss_spike, ….
#pragma once

#include "engine/config/config.h"

namespace tandem {

/// Throws ConfigError if keys contradict each other or have no effect.
void check_run_control(const TrainConfig& config);

/// Whether train.steps is the run's length: neither train.seconds nor train.tokens is set.
inline bool ends_by_steps(const TrainConfig& config) {
  return config.train.seconds == 0 && config.train.tokens == 0;
}

}  // namespace tandem
