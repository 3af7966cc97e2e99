// Comparison of a checkpoint with the run that resumes from it.
#pragma once

#include <string>
#include <vector>

#include "engine/checkpoint/checkpoint.h"
#include "engine/config/config.h"

namespace tandem {

/// A run that resumes. `config` must outlive this object.
class ResumedRun {
 public:
  explicit ResumedRun(const TrainConfig& config) : config_(config) {}

  /// Throws ConfigError naming each key of the model with both values, the sequence length, the
  /// seed or the text (`fingerprint`) that differs between the checkpoint and this run. The layout
  /// may differ.
  void require_same(const Checkpoint& checkpoint, const std::string& fingerprint,
                    const std::string& changes = "") const;
  /// Notes for the user, one per line: changed keys with both values, and whether no step is left.
  std::vector<std::string> describe(const TrainState& state) const;

 private:
  const TrainConfig& config_;
};

/// Throws ConfigError naming each key of the model with both values that differs between the model
/// in `path`, to start from, and that of this run. Keys that only training reads may differ.
void require_same_model(const std::string& path, const ModelConfig& model,
                        const ModelConfig& expected);

}  // namespace tandem
