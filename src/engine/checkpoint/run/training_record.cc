#include "engine/checkpoint/run/training_record.h"

#include <filesystem>
#include <nlohmann/json.hpp>
#include <vector>

#include "core/system/files.h"
#include "core/system/json.h"
#include "core/system/lines.h"
#include "engine/checkpoint/checkpoint.h"
#include "tandem/error.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

std::optional<int64_t> targets_until(const std::string& metrics, int64_t last_step) {
  if (!path_exists(metrics)) return std::nullopt;
  int64_t targets = 0, steps = 0;
  for (const std::string_view line : Lines(read_file(metrics))) {
    if (steps++ == last_step) break;
    const nlohmann::json entry = parse_json(line);
    const auto tokens = entry.is_object() ? entry.find("tokens") : entry.end();
    if (tokens == entry.end() || !tokens->is_number_integer()) return std::nullopt;
    targets += tokens->get<int64_t>();
  }
  if (steps < last_step) return std::nullopt;
  return targets;
}

}  // namespace

std::optional<TrainingRecord> training_record(const std::string& directory,
                                              const std::string& header_hash) {
  // DIR/., so that the parent of "DIR/" is not DIR.
  const fs::path model = fs::path(directory + "/.").lexically_normal().parent_path();
  std::vector<std::string> candidates{model.string()};
  std::string out = (model / "..").string();
  if (checkpoint_step(model.string())) {
    out += "/..";
  } else if (!path_exists(model.string() + "/state.json")) {
    candidates = list_checkpoints(out);
  }
  for (const std::string& path : candidates) {
    try {
      const StoredState stored = read_stored_state(path);
      const auto hash = stored.files.find("model.safetensors");
      if (hash == stored.files.end() || hash->second != header_hash) continue;
      const TrainState& state = stored.state;
      return TrainingRecord{state.seed, state.step,
                            targets_until(out + "/metrics.jsonl", state.step), state.config};
    } catch (const IoError&) {
      continue;  // damaged, or not a checkpoint: skipped
    }
  }
  return std::nullopt;
}

}  // namespace tandem
