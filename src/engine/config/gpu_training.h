// Limits of training on GPU ranks.
#pragma once

#include "engine/config/config.h"

namespace tandem {

/// Throws ConfigError, which names the key and what is allowed, if GPU ranks cannot train `config`.
/// `ranks_share_gpu`: several ranks of a process have the same GPU.
void check_gpu_training(const TrainConfig& config, bool ranks_share_gpu);
/// Throws ConfigError if GPU ranks cannot run a model's passes in bf16, tensor-parallel over `tp`.
void check_gpu_passes(const ModelConfig& model, int64_t tp);

}  // namespace tandem
