// Comparison of a checkpoint with the run that resumes from it.
#pragma once

#include <string>
#include <vector>

#include "engine/checkpoint/checkpoint.h"
#include "engine/config/config.h"

namespace tandem {

/// Throws ConfigError naming each key of the model with both values, the sequence length, the seed
/// or the text (`fingerprint`) that differs between the checkpoint and this run. The layout may
/// differ.
void require_same_run(const Checkpoint& checkpoint, const TrainConfig& config,
                      const std::string& fingerprint, const std::string& changes = "");

/// Throws ConfigError naming each key of the model with both values that differs between the model
/// in `path`, to start from, and this run. Keys that only training reads may differ.
void require_same_model(const std::string& path, const ModelConfig& model,
                        const TrainConfig& config);

/// Notes for the user on resuming, one per line: changed keys with both values, and whether no step
/// is left.
std::vector<std::string> describe_resume(const TrainState& state, const TrainConfig& config);

}  // namespace tandem
