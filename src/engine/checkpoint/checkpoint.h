// Checkpoints as files: OUT/checkpoints/step-00000100/{config.json, model.safetensors,
// optimizer.safetensors, state.json}, and residuals.safetensors where gradients travel with error
// feedback. Nothing here talks to other ranks (engine/checkpoint/saving.h does).
//
// A checkpoint is made in a temporary directory, every file fsynced, and renamed into place, so a
// directory named step-* is complete whatever was killed. One that takes a name in use is exchanged
// for the old one, which is removed afterwards (or kept under another name, where it may be the
// user's own): some valid one stands at every moment. state.json,
// written last, holds a hash of each other file (of a safetensors file: of its header, which holds
// a hash of each tensor) and of itself: a cut, changed or exchanged file, or tensor, is found by
// `verify_checkpoint`.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "core/safetensors.h"
#include "engine/model/config.h"

namespace tandem {

/// Everything beside weights and moments that a run needs to go on. Random numbers are functions of
/// (seed, counter), so the seed is their whole state.
struct TrainState {
  int64_t step = 0;         ///< finished
  int64_t next_sample = 0;  ///< of the sampler
  double elapsed_s = 0;
  double warmup_s = 0;  ///< elapsed_s when the learning rate's warm-up ended
  int64_t seq = 0, seed = 0;
  std::string data;    ///< fingerprint of the training stream
  std::string config;  ///< the job as TOML
  /// What computed it (build_identity()): other versions and processors round in other ways.
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
  ~CheckpointWriter();  ///< removes what was not committed
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;

  /// The temporary directory, where the safetensors files are to be written.
  static std::string folder_of(const std::string& out, int64_t step);
  std::string path(const std::string& name) const { return temporary_ + "/" + name; }
  /// `header_hashes`: what SafetensorsWriter::finish returned, by file name. Then the checkpoint
  /// stands under its name.
  void commit(const TrainState& state, const ModelConfig& model,
              const std::map<std::string, std::string>& header_hashes);

 private:
  std::string temporary_, final_;
};

/// OUT/checkpoints/step-00000100 for step 100.
std::string checkpoint_path(const std::string& out, int64_t step);
/// Paths of OUT/checkpoints/step-N, newest first. Other names (step-best, step-00000100.bak) are
/// the user's own. Throws IoError when the folder cannot be listed.
std::vector<std::string> list_checkpoints(const std::string& out);
/// state.json alone, checked against its own hash. Throws IoError.
TrainState read_train_state(const std::string& path);
/// The same, and what it says of the other files: a hash by name, of a safetensors file that of
/// its header.
struct StoredState {
  TrainState state;
  std::map<std::string, std::string> files;
};
StoredState read_stored_state(const std::string& path);
/// Writes config.json and state.json, which has the hashes of it and of the files in
/// `header_hashes`.
void write_state(const std::string& folder, const TrainState& state, const ModelConfig& model,
                 const std::map<std::string, std::string>& header_hashes);
/// Reads and checks config.json and every byte of the safetensors files `names`, of tensors those
/// in `share`. Throws IoError or ConfigError naming the file, and the tensor; also where a folder
/// named as a checkpoint holds that of another step.
ModelConfig verify_files(const std::string& path, const StoredState& stored,
                         std::span<const std::string> names, const Share& share = {});
/// The step that the name of a folder under checkpoints/ says; nothing for another folder.
std::optional<int64_t> step_of_checkpoint(const std::string& path);
/// Reads and checks every byte, of tensors those in `share`. Throws as verify_files.
Checkpoint verify_checkpoint(const std::string& path, const Share& share = {});
/// The newest that verifies; `warn` is told about each that does not. Throws IoError when there are
/// checkpoints but none verifies; nullopt when there are none.
std::optional<Checkpoint> newest_checkpoint(const std::string& out,
                                            const std::function<void(const std::string&)>& warn);
/// Lets the newest `keep` stand that verify. What is older is removed where a run has written it;
/// what does not verify is reported and not counted, and what cannot be removed is reported and
/// stands.
class CheckpointKeeper {
 public:
  CheckpointKeeper(std::string out, int64_t keep, std::function<void(const std::string&)> warn);
  /// `problem`: what verify_checkpoint has thrown of the new one, if anything. Removes what is too
  /// many, and what interrupted saves left.
  void saved(const std::string& path, const std::string& problem);

 private:
  void prune();
  void remove(const std::string& path);
  bool valid(const std::string& path);

  std::string out_;
  int64_t keep_;
  std::function<void(const std::string&)> warn_;
  std::map<std::string, bool> looked_at_;  // path -> verified
  std::set<std::string> stuck_;            // could not be removed
};

/// Files that are to stand in OUT/NAME, in place of those of the same names, which are removed only
/// once the new ones are complete. Other files that stand there, the user's own, stay.
class DirectoryWriter {
 public:
  DirectoryWriter(const std::string& out, const std::string& name);
  ~DirectoryWriter();  ///< removes what was not committed
  DirectoryWriter(const DirectoryWriter&) = delete;
  DirectoryWriter& operator=(const DirectoryWriter&) = delete;
  /// Where they are to be written.
  static std::string folder_of(const std::string& out, const std::string& name);
  void commit();

 private:
  std::string temporary_, target_;
};

}  // namespace tandem
