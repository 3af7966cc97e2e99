// Limits of training on GPU ranks.
#pragma once

#include "engine/config/config.h"

namespace tandem {

/// Throws ConfigError, which names the key and what is allowed, if GPU ranks cannot train `config`:
/// they train dense models, without data parallelism.
void check_gpu_training(const TrainConfig& config);

}  // namespace tandem
