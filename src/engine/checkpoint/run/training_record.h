// Training history of weights on disk, from the files of their run if these still exist.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace tandem {

struct TrainingRecord {
  int64_t seed = 0;
  int64_t steps = 0;
  /// Targets of these steps (one token per byte, and one between files), summed from
  /// OUT/metrics.jsonl; nullopt without that file.
  std::optional<int64_t> bytes_seen;
  std::string config;  ///< the job with every key, valid input of `tandem train`
};

/// Record of the model in `directory`, from its state.json or else from a checkpoint next to it
/// whose weights have the same header hash (SafetensorsFile), so that another step's record is not
/// mistaken for it. nullopt if none is found.
std::optional<TrainingRecord> training_record(const std::string& directory,
                                              const std::string& header_hash);

}  // namespace tandem
