#include "engine/checkpoint/run/same_run.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <string_view>
#include <tuple>

#include "core/system/printable.h"
#include "engine/checkpoint/run/run_end.h"
#include "tandem/error.h"

namespace tandem {
namespace {

/// Keys whose change alters the learning rate of all steps.
constexpr std::string_view kSchedule[] = {
    "train.steps",         "train.seconds",    "train.tokens",       "optimizer.lr",
    "optimizer.min_lr",    "optimizer.warmup", "optimizer.schedule", "optimizer.decay_fraction",
    "optimizer.decay_type"};

/// Keys of a model with which its weights compute the same.
constexpr std::string_view kNotInWeights[] = {"model.max_seq", "model.aux_loss_coeff",
                                              "model.router_bias_update_rate"};

/// Whether the changed key has no effect on training: the text is identified by its hash.
bool is_silent(const KeyDifference& changed) {
  return changed.key == "data.paths" || changed.key == "data.manifest" ||
         changed.key == "data.format" || changed.key == "data.text_key" ||
         changed.key == "data.tokenizer" || changed.key == "train.init" ||
         changed.key.starts_with("trace.") || changed.key.starts_with("check.") ||
         (changed.key == "train.dtype" && changed.after == "\"auto\"");
}

std::string describe_changes(TrainConfig before, TrainConfig config) {
  for (TrainConfig* each : {&before, &config}) {
    each->parallel.replicas = each->parallel.logical_replicas();
  }
  std::vector<std::string> changes;
  bool redrawn = false;
  for (const KeyDifference& changed : differing_keys(before, config)) {
    if (is_silent(changed)) continue;
    changes.push_back(fmt::format("{} {} -> {}", changed.key, changed.before, changed.after));
    redrawn |= std::ranges::find(kSchedule, changed.key) != std::end(kSchedule);
  }
  if (changes.empty()) return "";
  return fmt::format("changed since its last checkpoint: {}{}", fmt::join(changes, ", "),
                     redrawn ? "; the learning rate follows the new schedule from here" : "");
}

/// Sets the keys of `found` that decide on a sample's targets to those of the checkpoint.
void set_sample_keys(const TrainState& state, TrainConfig& found) {
  try {
    const TrainConfig before = parse_config(state.config, "state.json");
    found.data.document_mask = before.data.document_mask;
    found.data.packing = before.data.packing;
    found.data.document_separator = before.data.document_separator;
    found.data.order = before.data.order;
    found.data.shuffle_windows = before.data.shuffle_windows;
  } catch (const ConfigError&) {  // of another version: ResumedRun::describe says so
  }
}

/// Keys of learners, whose state and running exchange a checkpoint has, that differ from those of
/// the checkpoint; empty where neither has several.
std::vector<std::string> find_other_learners(const Checkpoint& checkpoint,
                                             const SyncConfig& expected) {
  std::vector<std::string> different;
  TrainConfig before;
  try {
    before = parse_config(checkpoint.state.config, "state.json");
  } catch (const ConfigError&) {  // of another version: ResumedRun::describe says so
    return different;
  }
  const SyncConfig& found = before.parallel.sync;
  if (found.num_learners() != expected.num_learners()) {
    return {
        fmt::format("sync.learners is {} in this checkpoint: expected {}; start a new run with "
                    "--init OUT/final, the learners' average, or --init {}, their weights as of "
                    "the last exchange",
                    found.num_learners(), expected.num_learners(), checkpoint.path)};
  }
  if (found.num_learners() == 1) return different;
  if (found.method != expected.method) {
    different.push_back(fmt::format("sync.method is \"{}\" in this checkpoint: expected \"{}\"",
                                    found.method, expected.method));
  }
  const bool leaves_out = found.is_sparse() && !found.is_demo();
  if (leaves_out && !expected.is_sparse() && !expected.has_quorum()) {
    different.push_back(fmt::format(
        "sync.topk is {} in this checkpoint: expected it in this run, too; without it the changes "
        "that were not sent would be lost",
        found.topk));
  }
  if (found.has_quorum() && !expected.has_quorum()) {
    different.push_back(fmt::format(
        "sync.quorum is {} in this checkpoint: expected {}; without a quorum the changes of late "
        "learners would be lost",
        found.quorum, expected.quorum));
  }
  for (const auto& [key, of_checkpoint, of_run] :
       {std::tuple("every", found.period(), expected.period()),
        std::tuple("fragments", found.num_fragments(), expected.num_fragments()),
        std::tuple("delay", found.delay, expected.delay),
        std::tuple("tile", int64_t(found.tile_side()), int64_t(expected.tile_side()))}) {
    if (of_checkpoint == of_run) continue;
    different.push_back(
        fmt::format("sync.{} is {} in this checkpoint: expected {}", key, of_checkpoint, of_run));
  }
  return different;
}

}  // namespace

void ResumedRun::require_same(const Checkpoint& checkpoint, const std::string& fingerprint,
                              const std::string& changes) const {
  TrainConfig found = config_;
  found.model = checkpoint.model;
  found.train.seq = checkpoint.state.seq;
  found.train.seed = checkpoint.state.seed;
  set_sample_keys(checkpoint.state, found);
  std::vector<std::string> different = find_other_learners(checkpoint, config_.parallel.sync);
  for (const KeyDifference& key : differing_keys(found, config_)) {
    different.push_back(
        fmt::format("{} is {} in this checkpoint: expected {}", key.key, key.before, key.after));
  }
  if (checkpoint.state.data != fingerprint) {
    different.push_back(
        fmt::format("the hash of the training text is {} in this checkpoint: expected {}{}",
                    printable(checkpoint.state.data), fingerprint,
                    changes.empty() ? "" : " (" + changes + ")"));
  }
  if (different.empty()) return;
  throw ConfigError(fmt::format("{}: {}", checkpoint.path, fmt::join(different, "; ")));
}

void require_same_model(const std::string& path, const ModelConfig& model,
                        const ModelConfig& expected) {
  try {
    model.check_training(1);
  } catch (const ConfigError& error) {
    throw ConfigError(fmt::format("--init {}: {}", path, error.what()));
  }
  TrainConfig found, wanted;
  found.model = model;
  wanted.model = expected;
  std::vector<std::string> different;
  for (const KeyDifference& key : differing_keys(found, wanted)) {
    if (std::ranges::find(kNotInWeights, key.key) != std::end(kNotInWeights)) continue;
    different.push_back(
        fmt::format("{} is {} in this model: expected {}", key.key, key.before, key.after));
  }
  if (different.empty()) return;
  throw ConfigError(fmt::format("--init {}: {}", path, fmt::join(different, "; ")));
}

std::vector<std::string> ResumedRun::describe(const TrainState& state) const {
  std::vector<std::string> lines;
  try {
    TrainConfig before = parse_config(state.config, "state.json");
    const bool has_scope = state.config.find("aux_loss_scope") != std::string::npos;
    if (config_.model.experts > 0 && !has_scope) before.train.aux_loss_scope = "step";  // as it was
    lines.push_back(describe_changes(before, config_));
  } catch (const ConfigError& error) {
    lines.push_back(fmt::format("its keys cannot be compared: {}", error.what()));
  }
  const std::string end = describe_end(state, config_.train);
  if (!end.empty()) lines.push_back("no step is left: " + end);
  std::erase(lines, "");
  return lines;
}

}  // namespace tandem
