#include "engine/checkpoint/stored_model.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <filesystem>
#include <utility>
#include <vector>

#include "core/system/files.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/config/config.h"
#include "engine/model/config_effect.h"
#include "engine/model/pretrained.h"
#include "engine/tokenizer/open.h"
#include "tandem/error.h"

namespace tandem {
namespace {

using Note = std::function<void(const std::string&)>;

constexpr const char* kWeightsFile = "model.safetensors";

bool has_state(const std::string& directory) {
  return path_exists(directory + "/state.json");
}

/// Settings of the run that the model in `directory` is of. Those of another version, which had
/// neither token files nor tokenizers or has other keys, are the default ones.
TrainConfig read_trained(const std::string& directory) {
  try {
    return parse_config(read_train_state(directory).config, directory + "/state.json");
  } catch (const ConfigError&) {
    return {};
  }
}

/// Whether `checkpoint` is newer than the model in `final`, and that not of the lowest loss.
bool is_newer(const std::string& checkpoint, const std::string& final, const Note& note) {
  if (!path_exists(final + "/config.json")) {
    note(fmt::format("no final/config.json: reads {}", checkpoint));
    return true;
  }
  if (has_state(final)) {
    const int64_t step = read_train_state(final).step;
    if (checkpoint_step(checkpoint) <= step || read_trained(final).train.save_best) {
      return false;
    }
    note(fmt::format("{} is of step {}: reads {}", final, step, checkpoint));
    return true;
  }
  const auto files = read_stored_state(checkpoint).files;
  const auto hash = files.find(kWeightsFile);
  if (hash == files.end() || hash->second != WeightFiles(final).header_hash()) {
    note(fmt::format("{} has no state.json and other weights than {}: reads {}", final, checkpoint,
                     final));
  }
  return false;
}

/// Notes that the model was trained on token files, and not of which tokenizer.
void note_tokens(const DataConfig& trained, const Note& note) {
  if (trained.format != "tokens") return;
  note("the model was trained on token files: text is read as bytes, with token 256 before it");
}

/// nullptr: text is read as bytes.
std::shared_ptr<const TextTokenizer> open_model_tokenizer(const std::string& directory,
                                                          const ModelConfig& config,
                                                          const SideFiles& side, const Note& note) {
  if (has_state(directory)) {
    const TrainConfig trained = read_trained(directory);
    if (trained.data.tokenizer.empty()) {
      note_tokens(trained.data, note);
      return nullptr;
    }
  } else if (config.vocab == kBos + 1) {
    return nullptr;
  }
  const std::string name = find_tokenizer(side.folder);
  if (name.empty()) {
    throw ConfigError(
        fmt::format("{}/config.json: vocab_size = {}: expected {} (text is read as bytes), or a "
                    "tokenizer.json, tekken.json, tokenizer.model, vocab.json with merges.txt, or "
                    ".tiktoken next to it",
                    directory, config.vocab, kBos + 1));
  }
  auto tokenizer = open_tokenizer(side.folder, config.vocab);
  if (!tokenizer->only_added_beyond()) {
    throw ConfigError(
        fmt::format("{}/{}: has {} tokens: expected at most vocab_size = {} of its config.json",
                    side.folder, name, config.vocab + tokenizer->num_beyond(), config.vocab));
  }
  for (const std::string& text : tokenizer->notes()) {
    note(fmt::format("{}/{}: {}", side.folder, name, text));
  }
  if (const int64_t beyond = tokenizer->num_beyond(); beyond > 0) {
    note(fmt::format("{}/{}: {} added tokens are beyond vocab_size = {}: refused in texts",
                     side.folder, name, beyond, config.vocab));
  }
  return tokenizer;
}

ModelConfig verified_config(const std::string& directory, const Note& note) {
  if (has_state(directory) || checkpoint_step(directory)) {
    const std::string names[] = {kWeightsFile};
    return verify_files(directory, read_stored_state(directory), names);
  }
  const std::string file = directory + "/config.json";
  std::vector<std::string> unused;
  const ModelConfig config = model_config_from_json(read_small_file(file), file, unused);
  if (!unused.empty()) {
    note(fmt::format("{}: keys without effect: {}", file, fmt::join(unused, ", ")));
  }
  WeightFiles(directory).verify();
  return config;
}

}  // namespace

std::string find_model(const std::string& path, const Note& note) {
  if (path_exists(path + "/config.json")) return path;
  if (std::error_code error; std::filesystem::is_regular_file(path, error)) {
    throw IoError(fmt::format("{}: {}", path, describe_other_weights(path)));
  }
  std::string final = final_path(path);
  const std::vector<std::string> checkpoints = list_checkpoints(path);
  if (!checkpoints.empty() && is_newer(checkpoints.front(), final, note))
    return checkpoints.front();
  if (path_exists(final + "/config.json")) return final;
  if (const std::string other = describe_other_weights(path); !other.empty()) {
    throw IoError(fmt::format("{}: {}", path, other));
  }
  throw IoError(fmt::format(
      "{}: no config.json in it or in its final/, and no checkpoints/: expected a trained model",
      path));
}

std::string side_folder(const std::string& directory) {
  return checkpoint_step(directory) ? directory + "/../.." : directory;
}

StoredModel open_model(const std::string& path, const Note& note) {
  std::string directory = find_model(path, note);
  ModelConfig config = verified_config(directory, note);
  WeightFiles weights(directory);
  require_same_tensors(config, weights);
  SideFiles side = read_side_files(side_folder(directory));
  auto tokenizer = open_model_tokenizer(directory, config, side, note);
  std::string identity = model_identity(config, weights);
  if (tokenizer) identity += ", " + tokenizer->name();
  return {std::move(directory), std::move(config),    std::move(weights),
          std::move(identity),  std::move(tokenizer), std::move(side)};
}

}  // namespace tandem
