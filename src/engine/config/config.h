// Configuration of a training run: a TOML file plus `--set table.key=value` overrides.
//
// Every key is one row of `config_keys()` (name, member, range, help); parsing, suggestions and the
// printed list all read that table, and defaults are those of a fresh TrainConfig. Unknown keys,
// wrong types and values out of range throw a ConfigError naming file, line, key and the allowed
// values.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "engine/model/config.h"

namespace tandem {

struct TrainConfig {
  ModelConfig model;
  struct {
    int64_t steps = 1000;
    double seconds = 0;
    int64_t tokens = 0;
    double max_seconds = 0;
    int64_t early_stop = 0;
    int64_t skip_nonfinite = 0;
    double max_loss_spike = 0;  ///< ratio
    int64_t skip_loss_spikes = 0;
    int64_t batch = 16;
    int64_t batch_start = 0;  ///< 0: the batch does not grow (batch_rampup.h)
    int64_t batch_increment = 0;
    int64_t batch_rampup_samples = 0;
    int64_t microbatch = 0;
    int64_t seq = 128;
    int64_t validate_every = 0;
    int64_t validate_bytes = 1 << 18;
    int64_t validate_steps = 0;
    std::string dtype = "auto";
    std::string aux_loss_scope = "microbatch";
    int64_t seed = 1;
    std::string init;  ///< folder of the model that the weights are of at first; empty: random ones
    bool deterministic = true;
    std::string recompute = "none";  ///< a Recompute
    int64_t recompute_layers = 0;    ///< 0: all
  } train;
  struct {
    std::string name = "adamw";
    double lr = 3e-3;
    double min_lr = 3e-4;
    std::string schedule = "cosine";
    double decay_fraction = 0.2;
    std::string decay_type = "linear";
    double beta1 = 0.9;
    double beta2 = 0.95;
    double eps = 1e-8;
    double weight_decay = 0.1;
    int64_t warmup = 20;
    double grad_clip = 1;
    std::vector<std::string> no_decay;  ///< patterns
    std::vector<std::string> lr_scale;  ///< "PATTERN=NUMBER"
  } optimizer;
  struct {
    int64_t tp = 1;
    int64_t dp = 1;
    int64_t replicas = 0;  ///< 0: dp (replicas.h)
    int64_t dp_shard = 0;  ///< 0: dp
    int64_t dp_host = 0;   ///< 0: dp
    int64_t ep = 1;
    int64_t zero = 1;
    int64_t pp = 1;
    int64_t virtual_stages = 1;
    std::string schedule = "1f1b";          ///< a schedule::PipelineKind
    std::vector<int64_t> layers_per_stage;  ///< by stage; empty: equal shares
    double dp_bucket_mib = 0;               ///< 0: chosen (bucket_mib)
    std::string strategy = "automatic";
    int64_t chunks = 0;
    std::string link;
    std::string codec = "none";  ///< a CodecPolicy
    bool error_feedback = true;
  } parallel;
  struct {
    std::vector<std::string> paths;
    std::string format = "auto";
    std::string text_key = "text";  ///< of JSON Lines
    std::string tokenizer;          ///< path; empty: bytes
    double val_fraction = 0;
    std::vector<std::string> val_paths;
    std::string manifest;
    std::string document_separator;  ///< text, or a token's number; empty: none
    bool document_mask = false;
    std::string packing = "none";
    std::string order = "shuffle";
    int64_t shuffle_windows = 1024;  ///< of a stream
  } data;
  struct {
    int64_t every = 0;
    int64_t snapshot_every = 0;
    bool peer_copy = false;
    double every_s = 0;
    bool first_step = false;
    int64_t keep = 2;
    std::string export_dtype = "f32";
  } checkpoint;
  struct {
    bool enabled = false;
    int64_t steps = 2;
    bool ranks = true;
    int64_t stream_mib = 0;
  } trace;
  struct {
    std::string action = "off";
    double weights = 1;  ///< this and the next two: shares
    double state = 0.1;
    double recompute = 0;
  } check;
};

using ConfigSlot = std::variant<int64_t*, double*, bool*, std::string*, std::vector<std::string>*,
                                std::vector<int64_t>*>;

struct ConfigKey {
  std::string name;  ///< "train.steps"
  ConfigSlot (*slot)(TrainConfig&);
  double min = 0, max = 0;           ///< for numbers, inclusive
  std::vector<std::string> choices;  ///< for strings; empty: any
  std::string help;
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

/// Key with two different values, in TOML syntax.
struct KeyDifference {
  std::string key, before, after;
};
/// In the order of `config_keys()`.
std::vector<KeyDifference> differing_keys(const TrainConfig& before, const TrainConfig& after);

/// Reads `file`, then applies `overrides` ("table.key=value"; the value is TOML, or else a string).
/// Relative data.paths, data.val_paths, data.manifest and data.tokenizer in the file are relative
/// to its directory, and train.init. `notes`: if not nullptr, receives a line for each key given by
/// a former name.
TrainConfig load_config(const std::string& file, std::span<const std::string> overrides,
                        std::vector<std::string>* notes = nullptr);
/// The same for text; `file` names it in messages. `base`: values of keys that are not given.
TrainConfig parse_config(const std::string& text, const std::string& file,
                         std::span<const std::string> overrides = {},
                         std::vector<std::string>* notes = nullptr, const TrainConfig& base = {});
/// Throws ConfigError if keys are inconsistent: model against parallel.tp and parallel.ep, batch
/// against dp and microbatch, seq against model.max_seq, layers and microbatches against
/// parallel.pp.
void check_config(const TrainConfig& config);
/// Whether check_config accepts it.
bool is_valid(const TrainConfig& config);
/// Takes the relative paths of the configuration to be relative to `folder`.
void make_paths_relative_to(TrainConfig& config, const std::string& folder);
/// Whole configuration as TOML that `parse_config` accepts.
std::string to_toml(const TrainConfig& config);

}  // namespace tandem
