// Checks of keys against each other.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <numeric>
#include <string>
#include <vector>

#include "core/system/printable.h"
#include "engine/config/batch_rampup.h"
#include "engine/config/config.h"
#include "engine/config/config_paths.h"
#include "engine/config/replicas.h"
#include "engine/config/run_control.h"
#include "engine/model/codec_policy.h"
#include "engine/model/layout.h"
#include "engine/model/parameter_patterns.h"
#include "schedule/pipeline.h"
#include "tandem/error.h"

namespace tandem {
namespace {

void check_patterns(const TrainConfig& config) {
  if (config.optimizer.no_decay.empty() && config.optimizer.lr_scale.empty()) return;
  std::vector<Parameter> list = ModelLayout(config.model, 1, 0).parameters;
  apply_patterns(config.optimizer.no_decay, config.optimizer.lr_scale, list);
}

void check_codec(const TrainConfig& config) {
  try {
    CodecPolicy::parse(config.parallel.codec)
        .require_used(config.model, int(config.parallel.tp), int(config.parallel.dp),
                      int(config.parallel.ep), int(config.parallel.pp));
  } catch (const InvalidArgument& error) {
    throw ConfigError(fmt::format("parallel.codec: {}", error.what()));
  }
}

/// Gradients that leave after every backward pass are complete then.
void check_gradient_window(const TrainConfig& config, schedule::PipelineKind kind) {
  if (config.parallel.zero < 2 || logical_replicas(config) == 1) return;
  const char* problem = nullptr;
  if (schedule::splits_backward(kind)) {
    problem = "a schedule without separate weight gradients (gpipe, 1f1b, interleaved)";
  } else if (config.model.tie_word_embeddings) {
    problem = "model.tie_word_embeddings = false";
  }
  if (!problem) return;
  throw ConfigError(fmt::format("parallel.zero = 2 with parallel.pp = {}: expected {}, or zero = 1",
                                config.parallel.pp, problem));
}

/// `batch`: samples of a replica.
void check_pipeline(const TrainConfig& config, int64_t batch) {
  const auto& parallel = config.parallel;
  schedule::PipelineKind kind{};
  try {
    kind = schedule::parse_pipeline_kind(parallel.schedule);
  } catch (const ConfigError& error) {
    throw ConfigError(fmt::format("parallel.schedule: {}", printable(error.what(), 300)));
  }
  const int64_t stages = parallel.pp * parallel.virtual_stages;
  const auto& layers = parallel.layers_per_stage;
  if (parallel.pp == 1 && stages > 1) {
    throw ConfigError(
        fmt::format("parallel.virtual_stages is {}: expected 1 where parallel.pp is 1", stages));
  }
  if (layers.empty() && stages > config.model.layers) {
    throw ConfigError(fmt::format(
        "parallel.pp x parallel.virtual_stages is {}: expected at most model.layers = {}, or "
        "parallel.layers_per_stage",
        stages, config.model.layers));
  }
  if (!layers.empty() &&
      (int64_t(layers.size()) != stages ||
       std::accumulate(layers.begin(), layers.end(), int64_t{0}) != config.model.layers)) {
    throw ConfigError(fmt::format(
        "parallel.layers_per_stage is [{}]: expected {} numbers, one per stage, whose sum is "
        "model.layers = {}",
        fmt::join(layers, ", "), stages, config.model.layers));
  }
  if (parallel.pp == 1) return;
  check_gradient_window(config, kind);
  const int64_t microbatch = config.train.microbatch > 0 ? config.train.microbatch : batch;
  const auto check_batch = [&](int64_t of_replica) {
    schedule::check_pipeline(
        {kind, int(parallel.pp), int(of_replica / microbatch), int(parallel.virtual_stages)});
  };
  check_batch(batch);
  if (config.train.batch_start == 0) return;
  const int64_t replicas = logical_replicas(config);
  // Schedules need a minimum or a multiple: two batches of the ramp-up stand for all.
  const int64_t start = config.train.batch_start / replicas;
  for (const int64_t of_replica : {start, start + config.train.batch_increment / replicas}) {
    try {
      check_batch(of_replica);
    } catch (const ConfigError& error) {
      throw ConfigError(fmt::format("with a batch of {} in the ramp-up: {}", of_replica * replicas,
                                    error.what()));
    }
  }
}

/// A stream's length and documents are not known before it is read.
void check_stream(const TrainConfig& config) {
  if (config.data.order != "stream") return;
  if (config.data.val_fraction > 0) {
    throw ConfigError(fmt::format(
        "data.val_fraction is {}: expected 0 where data.order is stream; data.val_paths names data "
        "to validate on",
        config.data.val_fraction));
  }
  if (config.data.packing != "none") {
    throw ConfigError(fmt::format("data.packing is {}: expected none where data.order is stream",
                                  config.data.packing));
  }
}

}  // namespace

void check_config(const TrainConfig& config) {
  check_replicas(config);
  const int64_t replicas = logical_replicas(config), batch = config.train.batch;
  const int64_t microbatch = config.train.microbatch, seq = config.train.seq;
  const int64_t validate = config.train.validate_every;
  if (batch % replicas != 0) {
    throw ConfigError(fmt::format("train.batch is {}: expected a multiple of {} = {}", batch,
                                  replicas_key(config), replicas));
  }
  if (microbatch > 0 && (batch / replicas) % microbatch != 0) {
    throw ConfigError(
        fmt::format("train.microbatch is {}: expected a divisor of train.batch / {} = {}",
                    microbatch, replicas_key(config), batch / replicas));
  }
  if (config.check.action == "replace" && config.checkpoint.keep < 2) {
    throw ConfigError(
        fmt::format("checkpoint.keep is {}: expected at least 2 where check.action is replace: the "
                    "newest checkpoint may be corrupt, too",
                    config.checkpoint.keep));
  }
  check_batch_rampup(config);
  check_run_control(config);
  if (seq > config.model.max_seq) {
    throw ConfigError(fmt::format("train.seq is {}: expected at most model.max_seq = {}", seq,
                                  config.model.max_seq));
  }
  const int64_t recomputed = config.train.recompute_layers;
  const bool recomputes = config.train.recompute != "none";
  if (const int64_t max = recomputes ? config.model.layers : 0; recomputed > max) {
    throw ConfigError(fmt::format(
        "train.recompute_layers is {}: expected at most {}", recomputed,
        recomputes ? fmt::format("model.layers = {}", max) : "0 where train.recompute is none"));
  }
  const bool has_val_paths = !config.data.val_paths.empty();
  if (validate > 0 && config.data.val_fraction == 0 && !has_val_paths) {
    throw ConfigError(fmt::format(
        "train.validate_every is {}: expected data.val_fraction above 0, which holds files "
        "out of training, or data.val_paths",
        validate));
  }
  if (config.data.val_fraction > 0 && has_val_paths) {
    throw ConfigError(
        fmt::format("data.val_fraction is {}: expected 0 where data.val_paths is given",
                    config.data.val_fraction));
  }
  check_stream(config);
  if (config.optimizer.schedule != "constant" && config.optimizer.min_lr > config.optimizer.lr) {
    throw ConfigError(fmt::format("optimizer.min_lr is {}: expected at most optimizer.lr = {}",
                                  config.optimizer.min_lr, config.optimizer.lr));
  }
  if (config.checkpoint.peer_copy && config.checkpoint.snapshot_every == 0) {
    throw ConfigError(
        "checkpoint.peer_copy is true: expected checkpoint.snapshot_every above 0 with it");
  }
  if (config.checkpoint.peer_copy && config.parallel.dp == 1) {
    throw ConfigError("checkpoint.peer_copy is true: expected parallel.dp of at least 2 with it");
  }
  if (config.data.paths.empty()) {
    throw ConfigError("data.paths is empty: expected folders, globs or files");
  }
  check_weights(config.data.paths, "data.paths");
  if (config.parallel.dp % config.parallel.ep != 0) {
    throw ConfigError(fmt::format("parallel.ep is {}: expected a divisor of parallel.dp = {}",
                                  config.parallel.ep, config.parallel.dp));
  }
  config.model.check_training(int(config.parallel.tp), int(config.parallel.ep));
  check_pipeline(config, batch / replicas);
  check_codec(config);
  check_patterns(config);
}

bool is_valid(const TrainConfig& config) {
  try {
    check_config(config);
  } catch (const Error&) {
    return false;
  }
  return true;
}

}  // namespace tandem
