// Limits of training on GPU ranks.
#pragma once

#include "engine/config/config.h"

namespace tandem {

/// Multiple of the sizes of e4m3 products on GPUs, whose rows are multiples of 16 bytes.
constexpr int64_t kFp8Unit = 16;

/// Throws ConfigError, which names the key and what is allowed, if GPU ranks cannot train `config`.
/// `ranks_share_gpu`: several ranks of a process have the same GPU.
void check_gpu_training(const TrainConfig& config, bool ranks_share_gpu);
/// Throws ConfigError if GPU ranks cannot run a model's passes in bf16, tensor-parallel over `tp`.
void check_gpu_passes(const ModelConfig& model, int64_t tp);

}  // namespace tandem
