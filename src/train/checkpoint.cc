#include "train/checkpoint.h"

#include <fcntl.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "core/files.h"
#include "core/safetensors.h"
#include "tandem/error.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kTemporary = ".tmp-";
constexpr const char* kRemoved = ".old-";
constexpr const char* kReplaced = ".was-";
constexpr const char* kPrefix = "step-";
constexpr const char* kSafetensors[] = {"model.safetensors", "optimizer.safetensors"};

void rename_path(const std::string& from, const std::string& to) {
  std::error_code code;
  fs::rename(from, to, code);
  if (code) throw IoError(fmt::format("{}: cannot rename to {}: {}", from, to, code.message()));
}

std::string hidden_beside(const std::string& path, const char* prefix) {
  const fs::path whole(path);
  return (whole.parent_path() / (prefix + whole.filename().string())).string();
}

/// Never leaves half of a directory under its old name.
void remove_directory(const std::string& path) {
  const std::string hidden = hidden_beside(path, kRemoved);
  std::error_code ignored;
  fs::remove_all(hidden, ignored);
  rename_path(path, hidden);
  fs::remove_all(hidden, ignored);
}

/// The complete directory `from` takes the name `to`; what had it is removed only afterwards. Where
/// the file system cannot exchange two names at once, the old one waits as `.was-`, from where
/// `restore_replaced` takes it back if the process ends in between.
void move_into_place(const std::string& from, const std::string& to) {
  const std::string parent = fs::path(to).parent_path().string();
  if (!path_exists(to)) {
    rename_path(from, to);
    sync_directory(parent);
    return;
  }
  std::string old = from;
  if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_EXCHANGE) != 0) {
    old = hidden_beside(to, kReplaced);
    std::error_code ignored;
    fs::remove_all(old, ignored);
    rename_path(to, old);
    rename_path(from, to);
  }
  sync_directory(parent);
  std::error_code ignored;
  fs::remove_all(old, ignored);
}

/// Ends a replacement that was cut short between its two renames.
void restore_replaced(const std::string& parent) {
  std::error_code code;
  for (const auto& entry : fs::directory_iterator(parent, code)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with(kReplaced)) continue;
    const std::string place = parent + "/" + name.substr(std::string_view(kReplaced).size());
    if (!path_exists(place)) rename_path(entry.path().string(), place);
  }
}

/// The text of state.json: canonical, with a hash of the rest of itself.
std::string seal(json root) {
  root.erase("hash");
  root["hash"] = content_hash(root.dump(2));
  return root.dump(2) + "\n";
}

json to_json(const TrainState& state) {
  return {{"format", 1},
          {"step", state.step},
          {"next_sample", state.next_sample},
          {"elapsed_s", state.elapsed_s},
          {"seq", state.seq},
          {"seed", state.seed},
          {"data", state.data},
          {"config", state.config}};
}

json read_state(const std::string& file) {
  const std::string text = read_file(file);
  json root = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!root.is_object() || seal(root) != text) {
    throw IoError(file + ": does not match its own hash (damaged)");
  }
  return root;
}

TrainState state_from_json(const json& root, const std::string& file) {
  TrainState state;
  try {
    root.at("step").get_to(state.step);
    root.at("next_sample").get_to(state.next_sample);
    root.at("elapsed_s").get_to(state.elapsed_s);
    root.at("seq").get_to(state.seq);
    root.at("seed").get_to(state.seed);
    root.at("data").get_to(state.data);
    root.at("config").get_to(state.config);
  } catch (const json::exception& error) {
    throw IoError(fmt::format("{}: {}", file, error.what()));
  }
  return state;
}

void check_hash(const std::string& file, const json& hashes, const std::string& name,
                const std::string& found) {
  const std::string expected = hashes.value(name, "");
  if (found != expected) {
    throw IoError(
        fmt::format("{}: hash {}: state.json expects {} (another checkpoint's file, or "
                    "damaged)",
                    file, found, expected));
  }
}

}  // namespace

std::string checkpoint_path(const std::string& out, int64_t step) {
  return fmt::format("{}/checkpoints/{}{:08}", out, kPrefix, step);
}

CheckpointWriter::CheckpointWriter(const std::string& out, int64_t step)
    : temporary_(hidden_beside(checkpoint_path(out, step), kTemporary)),
      final_(checkpoint_path(out, step)) {
  std::error_code ignored;
  fs::remove_all(temporary_, ignored);
  make_directories(temporary_);
}

CheckpointWriter::~CheckpointWriter() {
  std::error_code ignored;
  fs::remove_all(temporary_, ignored);
}

void CheckpointWriter::commit(const TrainState& state, const ModelConfig& model,
                              const std::map<std::string, std::string>& header_hashes) {
  const std::string config = to_json(model);
  write_file(path("config.json"), config);
  json root = to_json(state);
  root["files"] = header_hashes;
  root["files"]["config.json"] = content_hash(config);
  write_file(path("state.json"), seal(root));
  sync_directory(temporary_);
  move_into_place(temporary_, final_);  // the name is taken where resume passed over a damaged one
}

std::vector<std::string> list_checkpoints(const std::string& out) {
  std::vector<std::string> paths;
  std::error_code code;
  for (const auto& entry : fs::directory_iterator(out + "/checkpoints", code)) {
    if (entry.path().filename().string().starts_with(kPrefix)) {
      paths.push_back(entry.path().string());
    }
  }
  std::sort(paths.rbegin(), paths.rend());
  return paths;
}

TrainState read_train_state(const std::string& path) {
  return state_from_json(read_state(path + "/state.json"), path + "/state.json");
}

Checkpoint verify_checkpoint(const std::string& path) {
  const std::string state_file = path + "/state.json", config_file = path + "/config.json";
  const json root = read_state(state_file);
  Checkpoint checkpoint{path, state_from_json(root, state_file), {}};
  const json hashes = root.value("files", json::object());
  const std::string config = read_file(config_file);
  check_hash(config_file, hashes, "config.json", content_hash(config));
  checkpoint.model = model_config_from_json(config, config_file);
  for (const char* name : kSafetensors) {
    const SafetensorsFile file(path + "/" + name);
    file.verify(/*require_hashes=*/true);
    check_hash(file.path(), hashes, name, file.header_hash());
  }
  return checkpoint;
}

std::optional<Checkpoint> newest_checkpoint(const std::string& out,
                                            const std::function<void(const std::string&)>& warn) {
  restore_replaced(out + "/checkpoints");
  std::string last;
  for (const std::string& path : list_checkpoints(out)) {
    try {
      return verify_checkpoint(path);
    } catch (const Error& error) {
      last = error.what();
      warn(fmt::format("checkpoint refused: {}", last));
    }
  }
  if (!last.empty()) {
    throw IoError(fmt::format("{}/checkpoints: no valid checkpoint to resume from: {}", out, last));
  }
  return std::nullopt;
}

void prune_checkpoints(const std::string& out, int64_t keep) {
  const std::vector<std::string> paths = list_checkpoints(out);
  for (size_t i = size_t(keep); i < paths.size(); ++i) remove_directory(paths[i]);
  std::error_code code;
  for (const auto& entry : fs::directory_iterator(out + "/checkpoints", code)) {
    std::error_code ignored;
    const std::string name = entry.path().filename().string();
    if (name.starts_with(kTemporary) || name.starts_with(kRemoved) || name.starts_with(kReplaced)) {
      fs::remove_all(entry.path(), ignored);
    }
  }
}

void replace_directory(const std::string& out, const std::string& name,
                       const std::function<void(const std::string& directory)>& fill) {
  const std::string temporary = out + "/" + kTemporary + name, target = out + "/" + name;
  std::error_code ignored;
  fs::remove_all(temporary, ignored);
  make_directories(temporary);
  fill(temporary);
  sync_directory(temporary);
  move_into_place(temporary, target);
}

}  // namespace tandem
