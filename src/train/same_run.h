// Whether a checkpoint is of the run that is to go on from it.
#pragma once

#include <string>

#include "train/checkpoint.h"
#include "train/config.h"

namespace tandem {

/// Throws ConfigError naming the key where the checkpoint's model, sequence length, seed or text
/// (`fingerprint`) is another than this run's. The layout may be another.
void require_same_run(const Checkpoint& checkpoint, const TrainConfig& config,
                      const std::string& fingerprint);

}  // namespace tandem
