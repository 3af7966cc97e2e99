// Checkpoint files: OUT/checkpoints/step-00000100/{config.json, model.safetensors,
// optimizer.safetensors, state.json}, and residuals.safetensors for gradients with error feedback.
// Of several learners model.safetensors has the weights of their last exchanges, and
// optimizer.safetensors each one's weights and moments.
// No function here communicates with other ranks (engine/checkpoint/saving.h does).
//
// A checkpoint is written to a temporary directory, every file fsynced, and renamed, so a directory
// named step-* is complete even after a kill. If the name is in use, the old directory is exchanged
// and removed afterwards (or kept under another name if it may contain user files): a valid
// checkpoint exists at every moment. state.json, written last, holds a hash of each other file (for
// a safetensors file: of its header, which holds a hash of each tensor) and of itself:
// `verify_checkpoint` detects a truncated, changed or exchanged file or tensor.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "core/formats/safetensors.h"
#include "engine/model/config.h"

namespace tandem {

/// State of run control (engine/train/checks/step_guard.h, engine/checkpoint/run/run_end.h).
struct ControlState {
  int64_t tokens = 0;  ///< predicted in the samples consumed; -1: not recorded (older checkpoints)
  int64_t warmup_tokens = 0;  ///< tokens at the end of the learning rate's warm-up
  int64_t nonfinite_skips = 0, spike_skips = 0;  ///< steps dropped
  int64_t mean_steps = 0;                        ///< losses of the running mean
  double mean_loss = 0;
  double lowest_validation_loss = 0;
  int64_t validations_since_lowest = -1;  ///< -1: there was no validation
  bool operator==(const ControlState&) const = default;
};

/// State needed to resume a run, besides weights and moments. Random numbers are functions of
/// (seed, counter), so the seed is their whole state.
struct TrainState {
  int64_t step = 0;         ///< number of finished steps
  int64_t next_sample = 0;  ///< next sample of the sampler
  double elapsed_s = 0;
  double warmup_s = 0;  ///< elapsed_s at the end of the learning rate's warm-up
  ControlState control;
  int64_t seq = 0, seed = 0;
  std::string data;    ///< fingerprint of the training stream
  std::string config;  ///< the job as TOML
  /// Build and machine (build_identity()): other versions and processors may round differently.
  std::map<std::string, std::string> made_by;
  bool operator==(const TrainState&) const = default;
};

constexpr const char* kResidualsFile = "residuals.safetensors";

struct Checkpoint {
  std::string path;
  TrainState state;
  ModelConfig model;
};

class CheckpointWriter {
 public:
  CheckpointWriter(const std::string& out, int64_t step);
  ~CheckpointWriter();  ///< removes uncommitted files
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;

  /// Temporary directory in which to write the safetensors files.
  static std::string temporary_folder(const std::string& out, int64_t step);
  std::string path(const std::string& name) const { return temporary_ + "/" + name; }
  /// Writes the other files. `header_hashes`: results of SafetensorsWriter::finish, by file name.
  void complete(const TrainState& state, const ModelConfig& model,
                const std::map<std::string, std::string>& header_hashes);
  /// Renames the folder, whose files are synced, to its final name.
  void commit();

 private:
  std::string temporary_, final_;
};

/// OUT/final or, if a run was interrupted while it replaced that, the folder with the one before.
std::string final_path(const std::string& out);
/// Completes a replacement of OUT/final that was interrupted. Only with the lock of OUT.
void restore_final(const std::string& out);
/// OUT/checkpoints/step-00000100 for step 100.
std::string checkpoint_path(const std::string& out, int64_t step);
/// Paths of OUT/checkpoints/step-N, newest first. Other names (step-best, step-00000100.bak) belong
/// to the user. Throws IoError if the folder cannot be listed.
std::vector<std::string> list_checkpoints(const std::string& out);
/// Renames `path` to PATH.SUFFIX or, if that is taken, PATH.SUFFIX-2 and so on, which no run
/// resumes from. Returns the name. Throws IoError.
std::string set_aside(const std::string& path, const std::string& suffix);
/// Text of the state, with a hash of itself.
std::string to_text(const TrainState& state);
/// Inverse of `to_text`. Throws IoError with `name` if the text was changed.
TrainState train_state_from_text(const std::string& text, const std::string& name);
/// Reads only state.json and checks it against its own hash. Throws IoError.
TrainState read_train_state(const std::string& path);
/// State of state.json, and its hashes of the other files by name (for a safetensors file: of its
/// header).
struct StoredState {
  TrainState state;
  std::map<std::string, std::string> files;
};
StoredState read_stored_state(const std::string& path);
/// Writes config.json and state.json, with hashes of config.json and of the files in
/// `header_hashes`. `weights`: dtype of the model's file. `special`: tokens that config.json has,
/// too, by key (eos_token_id: one or a list, …).
void write_state(const std::string& folder, const TrainState& state, const ModelConfig& model,
                 const std::map<std::string, std::string>& header_hashes,
                 DType weights = DType::f32, const nlohmann::ordered_json& special = {});
/// Reads and checks config.json and every byte of the safetensors files `names`, limited to the
/// tensors in `share`. Throws IoError or ConfigError naming the file and the tensor; also if a
/// folder named as a checkpoint holds another step's.
ModelConfig verify_files(const std::string& path, const StoredState& stored,
                         std::span<const std::string> names, const Share& share = {});
/// Step number in the name of a folder under checkpoints/; nullopt for another folder.
std::optional<int64_t> checkpoint_step(const std::string& path);
/// Reads and checks every byte, limited to the tensors in `share`. Throws as verify_files.
Checkpoint verify_checkpoint(const std::string& path, const Share& share = {});
/// Newest checkpoint that verifies; calls `warn` for each that does not. Throws IoError if there
/// are checkpoints but none verifies; nullopt if there are none. `after_step` >= 0: only
/// checkpoints of later steps, and nullopt if none verifies.
std::optional<Checkpoint> newest_checkpoint(const std::string& out,
                                            const std::function<void(const std::string&)>& warn,
                                            int64_t after_step = -1);
/// Retains the newest `keep` checkpoints that verify. Older ones are removed if a run has written
/// them; invalid ones are reported and not counted, and ones that cannot be removed are reported
/// and retained.
class CheckpointKeeper {
 public:
  CheckpointKeeper(std::string out, int64_t keep, std::function<void(const std::string&)> warn);
  /// Prunes old checkpoints and leftovers of interrupted saves. `problem`: error of
  /// verify_checkpoint for the new one, or empty.
  void saved(const std::string& path, const std::string& problem);
  /// To be called before a checkpoint of about `bytes` is written, with the `free` bytes of the
  /// disk: if these do not suffice, removes leftovers of interrupted saves and then the oldest of
  /// several intact checkpoints, if that makes room; never the newest, and none in vain.
  void make_room(uint64_t bytes, uint64_t free);
  /// Warns once of `what`, the result of describe_overflow (engine/checkpoint/saving.h), if any.
  void note_overflow(int64_t step, const std::string& what);

 private:
  void prune();
  void remove(const std::string& path);
  bool valid(const std::string& path);

  std::string out_;
  int64_t keep_;
  std::function<void(const std::string&)> warn_;
  std::map<std::string, bool> looked_at_;  // path -> verified
  std::set<std::string> stuck_;            // could not be removed
  bool has_room_ = true, has_noted_overflow_ = false;
};

/// Writer of files to OUT/NAME that replaces those of the same names only once the new ones are
/// complete. Other files there, the user's, are kept.
class DirectoryWriter {
 public:
  DirectoryWriter(const std::string& out, const std::string& name);
  ~DirectoryWriter();  ///< removes uncommitted files
  DirectoryWriter(const DirectoryWriter&) = delete;
  DirectoryWriter& operator=(const DirectoryWriter&) = delete;
  /// Temporary directory in which to write them.
  static std::string temporary_folder(const std::string& out, const std::string& name);
  void commit();

 private:
  std::string temporary_, target_;
};

}  // namespace tandem
