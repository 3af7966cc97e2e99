// Limits of training on GPU ranks.
#pragma once

#include "engine/config/config.h"

namespace tandem {

/// Throws ConfigError, which names the key and what is allowed, if GPU ranks cannot train `config`.
/// `ranks_share_gpu`: several ranks have the same GPU.
void check_gpu_training(const TrainConfig& config, bool ranks_share_gpu);

}  // namespace tandem
