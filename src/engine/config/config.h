// Configuration of a training run: a TOML file plus `--set table.key=value` overrides.
//
// A job consists of sections, whose keys (name, slot, range, help) stand in the config.cc next to
// each. Parsing, suggestions and the printed list all read `config_keys()`, which has those of all
// sections; defaults are those of a fresh TrainConfig. Unknown keys, wrong types and values out of
// range throw a ConfigError naming file, line, key and the allowed values.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/checkpoint/config.h"
#include "engine/config/section.h"
#include "engine/data/config.h"
#include "engine/model/config.h"
#include "engine/optim/config.h"
#include "engine/parallel/config.h"
#include "engine/train/config.h"

namespace tandem {

/// Key with two different values, in TOML syntax.
struct KeyDifference {
  std::string key, before, after;
};

struct TrainConfig {
  ModelConfig model;
  RunConfig train;
  OptimizerConfig optimizer;
  ParallelConfig parallel;
  DataConfig data;
  CheckpointConfig checkpoint;
  TraceConfig trace;
  IntegrityConfig check;

  /// Whether check_config accepts it.
  bool is_valid() const;
  /// The whole job as TOML that `parse_config` accepts.
  std::string to_toml() const;
  /// Keys that `written` names, as TOML.
  std::string to_toml(std::span<const KeyDifference> written) const;
};

/// A section's key in the job.
struct ConfigKey {
  std::string name;  ///< "train.steps"
  std::function<ConfigSlot(TrainConfig&)> slot;
  Range range;
  std::string_view help;
};
std::span<const ConfigKey> config_keys();
/// Keys that had another name once, which is still read.
struct RenamedKey {
  std::string_view old, name;
};
std::span<const RenamedKey> renamed_keys();
/// The name of a key given by its former one; empty for all others.
std::string_view current_name(std::string_view old);
/// One line per key: name in 30 columns, then help, type, default, range.
std::string describe_config_keys();

/// Keys with different values, in the order of `config_keys()`.
std::vector<KeyDifference> differing_keys(const TrainConfig& before, const TrainConfig& after);

/// Reads `file`, then applies `overrides` ("table.key=value"; the value is TOML, or else a string).
/// Relative data.paths, data.val_paths, data.manifest and data.tokenizer in the file are relative
/// to its directory, and train.init. `notes`: if not nullptr, receives a line for each key given by
/// a former name.
TrainConfig load_config(const std::string& file, std::span<const std::string> overrides,
                        std::vector<std::string>* notes = nullptr);
/// Reads a job's text; `file` names it in messages. `base`: values of keys that are not given.
TrainConfig parse_config(const std::string& text, const std::string& file,
                         std::span<const std::string> overrides = {},
                         std::vector<std::string>* notes = nullptr, TrainConfig base = {});
/// Throws ConfigError if keys are inconsistent: model against parallel.tp and parallel.ep, batch
/// against dp and microbatch, seq against model.max_seq, layers and microbatches against
/// parallel.pp.
void check_config(const TrainConfig& config);
/// Takes the relative paths of the configuration to be relative to `folder`.
void make_paths_relative_to(TrainConfig& config, const std::string& folder);

}  // namespace tandem
