// How weights on disk were trained, as far as the run that left them still stands beside them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace tandem {

struct TrainingRecord {
  int64_t seed = 0;
  int64_t steps = 0;
  /// Targets of these steps (a token a byte, and one between files), as OUT/metrics.jsonl counts
  /// them; nullopt without that file.
  std::optional<int64_t> bytes_seen;
  std::string config;  ///< the job, with every key: `tandem train` takes it
};

/// Of the model in `directory`, by its state.json, or else by that of a checkpoint next to it: the
/// weights named there have the same header hash (SafetensorsFile), so that another step's record
/// does not pass for it. nullopt where none is found.
std::optional<TrainingRecord> training_record(const std::string& directory,
                                              const std::string& header_hash);

}  // namespace tandem
