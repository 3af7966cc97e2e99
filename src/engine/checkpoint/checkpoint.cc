#include "engine/checkpoint/checkpoint.h"

#include <fcntl.h>
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

#include "core/formats/safetensors.h"
#include "core/system/files.h"
#include "core/system/json.h"
#include "core/system/log.h"
#include "core/system/printable.h"
#include "engine/checkpoint/state_json.h"
#include "tandem/error.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kTemporary = ".tmp-";
constexpr const char* kRemoved = ".old-";
constexpr const char* kReplaced = ".was-";
constexpr const char* kPrefix = "step-";
constexpr const char* kFinal = "final";
constexpr size_t kMaxStateBytes = size_t{16} << 20;  // the job's configuration contains paths
constexpr const char* kSafetensors[] = {"model.safetensors", "optimizer.safetensors"};

void rename_path(const std::string& from, const std::string& to) {
  std::error_code code;
  fs::rename(from, to, code);
  if (code) throw IoError(fmt::format("{}: cannot rename to {}: {}", from, to, code.message()));
}

std::string hidden_next_to(const std::string& path, const char* prefix) {
  const fs::path whole(path);
  return (whole.parent_path() / (prefix + whole.filename().string())).string();
}

/// Whether `path` exists; a dangling link counts, too.
bool name_taken(const std::string& path) {
  std::error_code code;
  return fs::symlink_status(path, code).type() != fs::file_type::not_found;
}

/// Step number in a name made by checkpoint_path; nullopt for any other name, which belongs to the
/// user.
std::optional<int64_t> parse_step(const std::string& name) {
  int64_t step = 0;
  const std::string_view digits = std::string_view(name).substr(std::min<size_t>(5, name.size()));
  const auto [end, code] = std::from_chars(digits.data(), digits.data() + digits.size(), step);
  if (code != std::errc() || fs::path(checkpoint_path("", step)).filename() != name) return {};
  return step;
}

/// Whether the name was left by an interrupted save or removal.
bool is_leftover(const std::string& name) {
  for (const std::string_view prefix : {kTemporary, kRemoved, kReplaced}) {
    if (name.starts_with(prefix)) return parse_step(name.substr(prefix.size())).has_value();
  }
  return false;
}

/// Renames the directory before removal, so a partial one never keeps its name.
void remove_directory(const std::string& path) {
  const std::string hidden = hidden_next_to(path, kRemoved);
  std::error_code ignored;
  fs::remove_all(hidden, ignored);
  rename_path(path, hidden);
  fs::remove_all(hidden, ignored);
}

/// Renames the complete directory `from` to `to` and removes the previous `to` only afterwards. If
/// the file system cannot exchange two names atomically, the previous one is kept as `.was-`
/// meanwhile, from which `restore_replaced` recovers it if the process ends in between.
void move_to_target(const std::string& from, const std::string& to) {
  const std::string parent = fs::path(to).parent_path().string();
  if (!name_taken(to)) {
    rename_path(from, to);
    sync_directory(parent);
    return;
  }
  std::string old = from;
  if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_EXCHANGE) != 0) {
    old = hidden_next_to(to, kReplaced);
    std::error_code ignored;
    fs::remove_all(old, ignored);
    rename_path(to, old);
    rename_path(from, to);
  }
  sync_directory(parent);
  std::error_code ignored;
  fs::remove_all(old, ignored);
}

/// Completes a replacement of `target` interrupted between its two renames.
void restore_replaced(const std::string& target) {
  const std::string old = hidden_next_to(target, kReplaced);
  if (name_taken(old) && !name_taken(target)) rename_path(old, target);
}

void restore_checkpoints(const std::string& parent) {
  for (const std::string& name : names_in(parent)) {
    if (!name.starts_with(kReplaced) || !is_leftover(name)) continue;
    restore_replaced(parent + "/" + name.substr(std::string_view(kReplaced).size()));
  }
}

void remove_leftovers(const std::string& parent) {
  for (const std::string& name : names_in(parent)) {
    std::error_code ignored;
    if (is_leftover(name)) fs::remove_all(parent + "/" + name, ignored);
  }
}

/// Bytes on disk that are free once the files of the folder, and of folders in it, are removed.
uint64_t removable_bytes(const std::string& folder) {
  uint64_t bytes = 0;
  std::error_code code;
  fs::recursive_directory_iterator at(folder, code), end;
  for (; !code && at != end; at.increment(code)) {
    std::error_code unknown;
    if (!at->is_regular_file(unknown) || at->hard_link_count(unknown) != 1) continue;
    const uintmax_t size = at->file_size(unknown);
    if (!unknown) bytes += size;
  }
  return bytes;
}

json read_state(const std::string& file) {
  return parse_state(read_small_file(file, kMaxStateBytes), file);
}

std::string expected_hash(const StoredState& stored, const std::string& name) {
  const auto entry = stored.files.find(name);
  return entry == stored.files.end() ? "none" : entry->second;
}

[[noreturn]] void reject_hash(const std::string& file, const std::string& found,
                              const std::string& expected) {
  throw IoError(fmt::format(
      "{}: hash {}: its state.json expects {} (another training's or step's file, edited, or "
      "damaged)",
      file, found, printable(expected)));
}

/// Accepts an equivalent rewritten config.json outside checkpoints/, where other programs may have
/// saved it.
ModelConfig verified_config(const std::string& path, const StoredState& stored) {
  const std::string file = path + "/config.json", text = read_small_file(file);
  const std::string expected = expected_hash(stored, "config.json"), found = content_hash(text);
  if (found != expected && checkpoint_step(path)) reject_hash(file, found, expected);
  ModelConfig config = model_config_from_json(text, file);
  const auto is_saved = [&](DType weights) {
    return content_hash(to_json(config, weights)) == expected;
  };
  if (found != expected && !is_saved(DType::f32) && !is_saved(DType::bf16)) {
    reject_hash(file, found, expected);
  }
  return config;
}

/// Whether the folder may be removed: its name and its state.json, verified by its own hash, have
/// the same step.
bool written_by_run(const std::string& path) {
  const auto step = parse_step(fs::path(path).filename().string());
  std::error_code code;
  if (!step || fs::symlink_status(path, code).type() != fs::file_type::directory) return false;
  try {
    return read_train_state(path).step == *step;
  } catch (const IoError&) {
    return false;
  }
}

/// Renames a folder that may contain user files instead of removing it.
void keep_replaced(const std::string& path) {
  log_message(LogLevel::warn, fmt::format("{}: kept as {}: not all of it is this run's", path,
                                          set_aside(path, "replaced")));
}

}  // namespace

std::string set_aside(const std::string& path, const std::string& suffix) {
  std::string target = fmt::format("{}.{}", path, suffix);
  for (int number = 2; name_taken(target); ++number) {
    target = fmt::format("{}.{}-{}", path, suffix, number);
  }
  rename_path(path, target);
  return target;
}

std::string final_path(const std::string& out) {
  const std::string target = out + "/" + kFinal, old = hidden_next_to(target, kReplaced);
  return !name_taken(target) && path_exists(old) ? old : target;
}

void restore_final(const std::string& out) {
  restore_replaced(out + "/" + kFinal);
}

std::string checkpoint_path(const std::string& out, int64_t step) {
  return fmt::format("{}/checkpoints/{}{:08}", out, kPrefix, step);
}

std::string CheckpointWriter::temporary_folder(const std::string& out, int64_t step) {
  return hidden_next_to(checkpoint_path(out, step), kTemporary);
}

CheckpointWriter::CheckpointWriter(const std::string& out, int64_t step)
    : temporary_(temporary_folder(out, step)), final_(checkpoint_path(out, step)) {
  std::error_code ignored;
  fs::remove_all(temporary_, ignored);
  make_directories(temporary_);
}

CheckpointWriter::~CheckpointWriter() {
  std::error_code ignored;
  fs::remove_all(temporary_, ignored);
}

void CheckpointWriter::complete(const TrainState& state, const ModelConfig& model,
                                const std::map<std::string, std::string>& header_hashes) {
  write_state(temporary_, state, model, header_hashes);
}

void CheckpointWriter::commit() {
  sync_directory(temporary_);
  // The name is taken if resume skipped a damaged checkpoint.
  if (name_taken(final_) && !written_by_run(final_)) keep_replaced(final_);
  move_to_target(temporary_, final_);
}

std::vector<std::string> list_checkpoints(const std::string& out) {
  std::vector<std::string> paths;
  const std::string parent = out + "/checkpoints";
  for (const std::string& name : names_in(parent)) {
    if (parse_step(name)) paths.push_back(parent + "/" + name);
  }
  std::sort(paths.begin(), paths.end(), [](const std::string& a, const std::string& b) {
    return std::pair(a.size(), a) > std::pair(b.size(), b);  // steps above 8 digits have longer
                                                             // names
  });
  return paths;
}

std::string to_text(const TrainState& state) {
  return seal(to_json(state));
}

TrainState train_state_from_text(const std::string& text, const std::string& name) {
  return state_from_json(parse_state(text, name), name);
}

TrainState read_train_state(const std::string& path) {
  return state_from_json(read_state(path + "/state.json"), path + "/state.json");
}

StoredState read_stored_state(const std::string& path) {
  const std::string file = path + "/state.json";
  const json root = read_state(file);
  StoredState stored{state_from_json(root, file), {}};
  const json hashes = root.value("files", json::object());
  for (const auto& [name, hash] : hashes.items()) {
    if (hash.is_string()) stored.files[name] = hash.get<std::string>();
  }
  return stored;
}

void write_state(const std::string& folder, const TrainState& state, const ModelConfig& model,
                 const std::map<std::string, std::string>& header_hashes, DType weights,
                 const nlohmann::ordered_json& special) {
  auto keys = nlohmann::ordered_json::parse(to_json(model, weights));
  if (!special.is_null()) keys.update(special);
  const std::string config = dump_json(keys, 2) + "\n";
  write_file(folder + "/config.json", config);
  json root = to_json(state);
  root["files"] = header_hashes;
  root["files"]["config.json"] = content_hash(config);
  write_file(folder + "/state.json", seal(root));
}

ModelConfig verify_files(const std::string& path, const StoredState& stored,
                         std::span<const std::string> names, const Share& share) {
  if (const auto step = checkpoint_step(path); step && *step != stored.state.step) {
    throw IoError(fmt::format("{}/state.json: step {}: expected {}, as the folder's name says",
                              path, stored.state.step, *step));
  }
  ModelConfig config = verified_config(path, stored);
  for (const std::string& name : names) {
    const SafetensorsFile file(path + "/" + name);
    file.verify(/*require_hashes=*/true, share);
    const std::string expected = expected_hash(stored, name);
    if (file.header_hash() != expected) reject_hash(file.path(), file.header_hash(), expected);
  }
  return config;
}

std::optional<int64_t> checkpoint_step(const std::string& path) {
  const fs::path whole = fs::path(path + "/.").lexically_normal().parent_path();
  if (fs::absolute(whole).parent_path().filename() != "checkpoints") return std::nullopt;
  return parse_step(whole.filename().string());
}

Checkpoint verify_checkpoint(const std::string& path, const Share& share) {
  if (name_taken(path) && !path_exists(path)) throw IoError(path + ": a link to nothing");
  const StoredState stored = read_stored_state(path);
  std::vector<std::string> names(std::begin(kSafetensors), std::end(kSafetensors));
  if (stored.files.contains(kResidualsFile)) names.emplace_back(kResidualsFile);
  return {path, stored.state, verify_files(path, stored, names, share)};
}

std::optional<Checkpoint> newest_checkpoint(const std::string& out,
                                            const std::function<void(const std::string&)>& warn,
                                            int64_t after_step) {
  restore_checkpoints(out + "/checkpoints");
  std::string last;
  for (const std::string& path : list_checkpoints(out)) {
    if (checkpoint_step(path) <= after_step) break;  // the newest is the first
    try {
      return verify_checkpoint(path);
    } catch (const Error& error) {
      last = error.what();
      warn(fmt::format("checkpoint refused: {}", last));
    }
  }
  if (!last.empty() && after_step < 0) {
    throw IoError(fmt::format("{}/checkpoints: no valid checkpoint to resume from: {}", out, last));
  }
  return std::nullopt;
}

CheckpointKeeper::CheckpointKeeper(std::string out, int64_t keep,
                                   std::function<void(const std::string&)> warn)
    : out_(std::move(out)), keep_(keep), warn_(std::move(warn)) {}

void CheckpointKeeper::saved(const std::string& path, const std::string& problem) {
  if (problem.empty()) {
    looked_at_[path] = true;
  } else {
    warn_("checkpoint refused: " + problem);  // not written: an older one of the name stays
  }
  prune();
}

bool CheckpointKeeper::valid(const std::string& path) {
  const auto known = looked_at_.find(path);
  if (known != looked_at_.end()) return known->second;
  try {
    verify_checkpoint(path);
    return looked_at_[path] = true;
  } catch (const Error& error) {
    warn_(fmt::format("checkpoint refused: {}", error.what()));
    return looked_at_[path] = false;
  }
}

void CheckpointKeeper::remove(const std::string& path) {
  try {
    remove_directory(path);
    looked_at_.erase(path);
  } catch (const IoError& error) {
    if (stuck_.insert(path).second) warn_(fmt::format("an old checkpoint stays: {}", error.what()));
  }
}

void CheckpointKeeper::prune() {
  int64_t num_valid = 0;
  for (const std::string& path : list_checkpoints(out_)) {
    if (num_valid < keep_) {
      num_valid += valid(path);
    } else if (written_by_run(path)) {
      remove(path);
    }
  }
  if (num_valid > 0) remove_leftovers(out_ + "/checkpoints");
}

void CheckpointKeeper::note_overflow(int64_t step, const std::string& what) {
  if (what.empty() || std::exchange(has_noted_overflow_, true)) return;
  warn_(fmt::format("step {}: {} (lower optimizer.lr)", step, what));
}

void CheckpointKeeper::make_room(uint64_t bytes, uint64_t free) {
  const std::vector<std::string> present = list_checkpoints(out_);  // newest first
  if (!present.empty()) bytes = std::max(bytes, removable_bytes(present.front()));
  const bool had_room = std::exchange(has_room_, free >= bytes);
  if (has_room_) return;
  std::vector<std::string> intact;
  for (const std::string& path : present) {
    if (valid(path)) intact.push_back(path);
  }
  if (intact.empty()) return;
  const std::string parent = out_ + "/checkpoints";
  for (const std::string& name : names_in(parent)) {
    if (is_leftover(name)) free += removable_bytes(parent + "/" + name);
  }
  remove_leftovers(parent);
  std::vector<std::string> dropped;
  for (size_t i = intact.size(); i-- > 1 && free < bytes;) {
    if (!written_by_run(intact[i])) continue;
    dropped.push_back(intact[i]);
    free += removable_bytes(intact[i]);
  }
  if (free < bytes) return;
  for (const std::string& path : dropped) {
    if (had_room) {
      warn_(fmt::format(
          "{}: no room for {} and one more checkpoint: the oldest intact ones are removed "
          "before others are written, and at least one stays",
          parent, fs::path(path).filename().string()));
    }
    remove(path);
  }
}

namespace {

/// Adds the other files of the directory `from` to `to`, as hard links if the file system supports
/// them. Returns false on failure.
bool keep_other_files(const std::string& from, const std::string& to) {
  for (const std::string& name : names_in(from)) {
    if (name_taken(to + "/" + name)) continue;
    const fs::path source = from + "/" + name, target = to + "/" + name;
    const auto options = fs::copy_options::recursive | fs::copy_options::copy_symlinks;
    std::error_code code;
    fs::copy(source, target, options | fs::copy_options::create_hard_links, code);
    if (!code) continue;
    fs::remove_all(target, code);
    fs::copy(source, target, options, code);
    if (code) return false;
  }
  return true;
}

}  // namespace

std::string DirectoryWriter::temporary_folder(const std::string& out, const std::string& name) {
  return out + "/" + kTemporary + name;
}

DirectoryWriter::DirectoryWriter(const std::string& out, const std::string& name)
    : temporary_(temporary_folder(out, name)), target_(out + "/" + name) {
  std::error_code ignored;
  fs::remove_all(temporary_, ignored);
  make_directories(temporary_);
}

DirectoryWriter::~DirectoryWriter() {
  std::error_code ignored;
  fs::remove_all(temporary_, ignored);
}

void DirectoryWriter::commit() {
  std::error_code code;
  const bool folder = fs::symlink_status(target_, code).type() == fs::file_type::directory;
  if (name_taken(target_) && !(folder && keep_other_files(target_, temporary_)))
    keep_replaced(target_);
  sync_directory(temporary_);
  move_to_target(temporary_, target_);
}

}  // namespace tandem
