// Limits of training on GPU ranks.
#pragma once

#include "engine/config/config.h"

namespace tandem {

/// Throws ConfigError, which names the key and what is allowed, if GPU ranks cannot train `config`.
/// `ranks_share_gpu`: several ranks have the same GPU.
void check_gpu_training(const TrainConfig& config, bool ranks_share_gpu);
/// The same for the passes of a model, in bf16, on `tp` tensor-parallel ranks.
void check_gpu_passes(const ModelConfig& model, int64_t tp);

}  // namespace tandem
