// Limits of training on GPU ranks.
#pragma once

#include "engine/config/config.h"

namespace tandem {

/// Throws ConfigError, which names the key and what is allowed, if GPU ranks cannot train `config`:
/// they train without data parallelism, and experts in bf16.
void check_gpu_training(const TrainConfig& config);

}  // namespace tandem
