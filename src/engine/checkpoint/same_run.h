// Whether a checkpoint is of the run that is to go on from it, and in what that run is another one.
#pragma once

#include <string>
#include <vector>

#include "engine/checkpoint/checkpoint.h"
#include "engine/config/config.h"

namespace tandem {

/// Throws ConfigError naming each key of the model with both values, the sequence length, the seed
/// or the text (`fingerprint`), where the checkpoint has another than this run. The layout may be
/// another.
void require_same_run(const Checkpoint& checkpoint, const TrainConfig& config,
                      const std::string& fingerprint);

/// Notes for the user as the run goes on: keys that changed, with both values, and that no
/// step is left. Lines.
std::vector<std::string> describe_resume(const TrainState& state, const TrainConfig& config);

}  // namespace tandem
