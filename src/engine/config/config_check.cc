// Checks of sections against each other.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <numeric>
#include <utility>
#include <vector>

#include "engine/config/config.h"
#include "engine/model/codec_policy.h"
#include "engine/model/layout.h"
#include "engine/model/parameter_patterns.h"
#include "kernels/dct.h"
#include "schedule/context.h"
#include "schedule/pipeline.h"
#include "tandem/error.h"

namespace tandem {
namespace {

void check_patterns(const OptimizerConfig& optimizer, const ModelConfig& model) {
  if (optimizer.no_decay.empty() && optimizer.lr_scale.empty()) return;
  std::vector<Parameter> list = ModelLayout(model, 1, 0).parameters;
  apply_patterns(optimizer.no_decay, optimizer.lr_scale, list);
}

void check_codec(const ParallelConfig& parallel, const ModelConfig& model) {
  try {
    CodecPolicy::parse(parallel.codec)
        .require_used(model, int(parallel.tp), int(parallel.copies()), int(parallel.ep),
                      int(parallel.pp), int(parallel.cp));
  } catch (const InvalidArgument& error) {
    throw ConfigError(fmt::format("parallel.codec: {}", error.what()));
  }
}

/// Norms of whole tensors are summed over state that all replicas divide.
void check_trust_ratios(const ParallelConfig& parallel, const std::string& optimizer) {
  const std::string expected_zero = fmt::format("0 with optimizer.name = \"{}\"", optimizer);
  constexpr const char* kAdamw = "optimizer.name = \"adamw\"";
  if (parallel.zero == 0) {
    throw ConfigError(fmt::format("parallel.zero is 0: expected {}, or zero = 1", kAdamw));
  }
  if (parallel.replicates_state()) {
    throw ConfigError(fmt::format("parallel.dp_shard is 1: expected {}, or 0", kAdamw));
  }
  if (parallel.has_shard_groups()) {
    throw ConfigError(
        fmt::format("parallel.dp_shard is {}: expected {}", parallel.dp_shard, expected_zero));
  }
  if (parallel.has_host_groups()) {
    throw ConfigError(
        fmt::format("parallel.dp_host is {}: expected {}", parallel.dp_host, expected_zero));
  }
  if (parallel.replicas > parallel.dp) {
    throw ConfigError(fmt::format("parallel.replicas is {} with parallel.dp = {}: expected {}",
                                  parallel.replicas, parallel.dp, kAdamw));
  }
}

/// Tensor-parallel ranks must have the same norms, and decide apart which learners count.
void check_quorum(const ParallelConfig& parallel) {
  if (!parallel.sync.has_quorum() || parallel.tp == 1) return;
  throw ConfigError(
      fmt::format("sync.quorum is {} with parallel.tp = {}: expected sync.learners = {}, or tp = 1",
                  parallel.sync.quorum, parallel.tp, parallel.sync.learners));
}

/// Tiles of whole tensors must each be on one tensor-parallel rank.
void check_tiles(const ParallelConfig& parallel, const ModelConfig& model) {
  const int tp = int(parallel.tp);
  for (int rank = 1; rank < tp; ++rank) {
    for (const Parameter& p : ModelLayout(model, tp, rank).parameters) {
      if (!p.sharding.over_tp()) continue;
      const int64_t rows = p.shape.size() > 1 ? p.shape[0] : 1;
      const DctTiles tiles = DctTiles::of(rows, p.shape.back(), parallel.sync.tile_side());
      const bool by_rows = p.sharding.tp_dim == 0 && p.shape.size() > 1;
      if (p.sharding.begin % (by_rows ? tiles.height : tiles.width) == 0) continue;
      throw ConfigError(fmt::format(
          "parallel.tp is {} with sync.method = \"demo\": expected a sync.tile whose tiles lie on "
          "one rank each: those of {}, {} x {}, are {} x {}, and rank {} begins with {} {}",
          tp, p.name, rows, p.shape.back(), tiles.height, tiles.width, rank,
          by_rows ? "row" : "column", p.sharding.begin));
    }
  }
}

void check_demo(const ParallelConfig& parallel, const OptimizerConfig& optimizer,
                const ModelConfig& model) {
  if (!parallel.sync.is_demo()) return;
  if (optimizer.name != OptimizerConfig().name) {
    throw ConfigError(fmt::format(
        "optimizer.name is \"{}\" with sync.method = \"demo\", which is its own: expected none",
        optimizer.name));
  }
  // Routers' biases change by each learner's load, and DeMo exchanges only what follows gradients.
  if (model.router_bias_update_rate != 0) {
    throw ConfigError(
        fmt::format("model.router_bias_update_rate is {} with sync.method = \"demo\": expected 0",
                    model.router_bias_update_rate));
  }
  if (model.parallel_block) {  // rows of two matrices alternate
    throw ConfigError("model.parallel_block is true with sync.method = \"demo\": expected false");
  }
  check_tiles(parallel, model);
}

/// Replicas that a rank runs in turn must have the auxiliary loss of one rank each.
void check_replicas(const ParallelConfig& parallel, const RunConfig& train,
                    const ModelConfig& model) {
  if (parallel.replicas <= parallel.dp || model.experts == 0 || model.aux_loss_coeff == 0) return;
  const int64_t samples = train.batch / parallel.replicas;
  const bool is_split = train.microbatch > 0 && train.microbatch < samples;
  if (!is_split || train.aux_loss_scope != "microbatch") return;
  throw ConfigError(fmt::format(
      "parallel.replicas is {} with parallel.dp = {}: expected train.aux_loss_scope = \"step\"",
      parallel.replicas, parallel.dp));
}

/// Replicas share each batch; microbatches keep their size while it grows.
void check_batch(const RunConfig& train, const ParallelConfig& parallel) {
  const int64_t replicas = parallel.logical_replicas(), batch = train.batch;
  const char* const key = parallel.replicas_key();
  if (batch % replicas != 0) {
    throw ConfigError(
        fmt::format("train.batch is {}: expected a multiple of {} = {}", batch, key, replicas));
  }
  if (train.microbatch > 0 && (batch / replicas) % train.microbatch != 0) {
    throw ConfigError(
        fmt::format("train.microbatch is {}: expected a divisor of train.batch / {} = {}",
                    train.microbatch, key, batch / replicas));
  }
  if (train.batch_start == 0) return;
  const int64_t unit = train.microbatch * replicas;
  for (const auto& [name, value] : {std::pair("batch_start", train.batch_start),
                                    std::pair("batch_increment", train.batch_increment)}) {
    if (value % unit == 0) continue;
    throw ConfigError(
        fmt::format("train.{} is {}: expected a multiple of train.microbatch x {} = {}", name,
                    value, key, unit));
  }
}

/// Gradients that leave after every backward pass are complete then.
void check_gradient_window(const ParallelConfig& parallel, const ModelConfig& model,
                           schedule::PipelineKind kind) {
  if (parallel.zero < 2 || parallel.logical_replicas() * parallel.cp == 1) return;
  const char* problem = nullptr;
  if (schedule::splits_backward(kind)) {
    problem = "a schedule without separate weight gradients (gpipe, 1f1b, interleaved)";
  } else if (model.tie_word_embeddings) {
    problem = "model.tie_word_embeddings = false";
  }
  if (!problem) return;
  throw ConfigError(fmt::format("parallel.zero = 2 with parallel.pp = {}: expected {}, or zero = 1",
                                parallel.pp, problem));
}

void check_stages(const ParallelConfig& parallel, const ModelConfig& model) {
  const int64_t stages = parallel.pp * parallel.virtual_stages;
  const auto& layers = parallel.layers_per_stage;
  if (layers.empty() && stages > model.layers) {
    throw ConfigError(fmt::format(
        "parallel.pp x parallel.virtual_stages is {}: expected at most model.layers = {}, or "
        "parallel.layers_per_stage",
        stages, model.layers));
  }
  if (!layers.empty() &&
      (int64_t(layers.size()) != stages ||
       std::accumulate(layers.begin(), layers.end(), int64_t{0}) != model.layers)) {
    throw ConfigError(fmt::format(
        "parallel.layers_per_stage is [{}]: expected {} numbers, one per stage, whose sum is "
        "model.layers = {}",
        fmt::join(layers, ", "), stages, model.layers));
  }
}

void check_schedule(const ParallelConfig& parallel, const RunConfig& train) {
  const schedule::PipelineKind kind = schedule::parse_pipeline_kind(parallel.schedule);
  const int64_t replicas = parallel.logical_replicas(), batch = train.batch / replicas;
  const int64_t microbatch = train.microbatch > 0 ? train.microbatch : batch;
  const auto check_batch_of = [&](int64_t of_replica) {
    schedule::check_pipeline(
        {kind, int(parallel.pp), int(of_replica / microbatch), int(parallel.virtual_stages)});
  };
  check_batch_of(batch);
  if (train.batch_start == 0) return;
  // Schedules need a minimum or a multiple: two batches of the ramp-up stand for all.
  const int64_t start = train.batch_start / replicas;
  for (const int64_t of_replica : {start, start + train.batch_increment / replicas}) {
    try {
      check_batch_of(of_replica);
    } catch (const ConfigError& error) {
      throw ConfigError(fmt::format("with a batch of {} in the ramp-up: {}", of_replica * replicas,
                                    error.what()));
    }
  }
}

/// Gradients in bf16 are those of one microbatch, on their way to AdamW.
void check_bf16_gradients(const RunConfig& train, const ParallelConfig& parallel,
                          const std::string& optimizer, const ModelConfig& model) {
  const int64_t samples = train.batch / parallel.logical_replicas();
  if (train.microbatch > 0 && train.microbatch < samples) {
    throw ConfigError(
        fmt::format("train.gradient_dtype is bf16 with {} microbatches a step: expected f32, in "
                    "which their gradients are summed, or train.microbatch = {}",
                    samples / train.microbatch, samples));
  }
  const bool encodes =
      parallel.copies() > 1 && !CodecPolicy::parse(parallel.codec).gradients.is_none();
  for (const auto& [is_set, key] :
       {std::pair(parallel.zero != 1, fmt::format("parallel.zero = {}", parallel.zero)),
        std::pair(parallel.replicas > parallel.dp,
                  fmt::format("parallel.replicas = {}", parallel.replicas)),
        std::pair(parallel.has_shard_groups(),
                  fmt::format("parallel.dp_shard = {}", parallel.dp_shard)),
        std::pair(parallel.has_host_groups(),
                  fmt::format("parallel.dp_host = {}", parallel.dp_host)),
        std::pair(encodes, fmt::format("parallel.codec = \"{}\"", parallel.codec)),
        std::pair(parallel.sync.is_demo(), std::string("sync.method = \"demo\"")),
        std::pair(optimizer != "adamw", fmt::format("optimizer.name = \"{}\"", optimizer)),
        std::pair(model.mlp_bias, std::string("model.mlp_bias = true")),
        std::pair(model.attention_sinks, std::string("model.attention_sinks = true")),
        std::pair(model.qk_norm_all_heads, std::string("model.qk_norm_all_heads = true")),
        std::pair(model.qkv_bias, std::string("model.qkv_bias = true"))}) {
    if (!is_set) continue;
    throw ConfigError(fmt::format("train.gradient_dtype is bf16 with {}: expected f32", key));
  }
}

void check_gradient_dtypes(const RunConfig& train, const ParallelConfig& parallel,
                           const std::string& optimizer, const ModelConfig& model) {
  for (const auto& [name, dtype] : {std::pair("gradient_dtype", train.gradient_dtype),
                                    std::pair("residual_gradient", train.residual_gradient)}) {
    if (dtype == "f32" || train.activation_dtype() == DType::bf16) continue;
    throw ConfigError(fmt::format(
        "train.{} is {} with train.dtype = \"{}\": expected f32, or train.dtype = \"bf16\" or "
        "\"fp8\"",
        name, dtype, train.dtype));
  }
  if (train.residual_gradient != "f32" && parallel.pp > 1) {
    throw ConfigError(
        fmt::format("train.residual_gradient is {} with parallel.pp = {}: expected f32, in which "
                    "stages send it",
                    train.residual_gradient, parallel.pp));
  }
  if (train.gradient_dtype != "f32") {
    check_bf16_gradients(train, parallel, optimizer, model);
  }
}

void check_head_rows(const RunConfig& train, const ParallelConfig& parallel,
                     const ModelConfig& model) {
  if (train.head_rows == 0) return;
  const int64_t samples = train.batch / parallel.logical_replicas();
  const int64_t microbatch = train.microbatch > 0 ? train.microbatch : samples;
  for (int rank = 0; rank < int(parallel.cp); ++rank) {
    const int64_t tokens =
        microbatch * schedule::context_rows(train.seq, int(parallel.cp), rank).count();
    if (tokens % train.head_rows == 0 && train.head_rows % parallel.tp == 0) continue;
    throw ConfigError(fmt::format(
        "train.head_rows is {}: expected 0, or a divisor of the {} tokens of a microbatch{} that "
        "is a multiple of parallel.tp = {}",
        train.head_rows, tokens,
        parallel.cp > 1 ? fmt::format(" on index {} of parallel.cp = {}", rank, parallel.cp) : "",
        parallel.tp));
  }
  if (!model.tie_word_embeddings || parallel.pp == 1) return;
  throw ConfigError(fmt::format(
      "train.head_rows is {} with model.tie_word_embeddings and parallel.pp = {}: expected 0",
      train.head_rows, parallel.pp));
}

void check_model(const RunConfig& train, const ModelConfig& model) {
  if (train.seq > model.max_seq) {
    throw ConfigError(fmt::format("train.seq is {}: expected at most model.max_seq = {}", train.seq,
                                  model.max_seq));
  }
  if (model.experts == 0 && train.moe_save != "sorted") {
    throw ConfigError(fmt::format(
        "train.moe_save is {} with model.experts = 0: expected sorted, as it has no effect",
        train.moe_save));
  }
  const bool recomputes = train.recompute != "none";
  if (const int64_t max = recomputes ? model.layers : 0; train.recompute_layers > max) {
    throw ConfigError(fmt::format(
        "train.recompute_layers is {}: expected at most {}", train.recompute_layers,
        recomputes ? fmt::format("model.layers = {}", max) : "0 where train.recompute is none"));
  }
}

}  // namespace

void check_config(const TrainConfig& config) {
  const ModelConfig& model = config.model;
  const RunConfig& train = config.train;
  const ParallelConfig& parallel = config.parallel;
  const DataConfig& data = config.data;
  const CheckpointConfig& checkpoint = config.checkpoint;
  parallel.check();
  check_demo(parallel, config.optimizer, model);
  check_quorum(parallel);
  if (config.optimizer.uses_trust_ratios()) {
    check_trust_ratios(parallel, config.optimizer.name);
  }
  check_replicas(parallel, train, model);
  train.check();
  check_batch(train, parallel);
  if (config.check.action == "replace" && checkpoint.keep < 2) {
    throw ConfigError(
        fmt::format("checkpoint.keep is {}: expected at least 2 where check.action is replace: the "
                    "newest checkpoint may be corrupt, too",
                    checkpoint.keep));
  }
  check_model(train, model);
  if (train.validate_every > 0 && data.val_fraction == 0 && data.val_paths.empty()) {
    throw ConfigError(fmt::format(
        "train.validate_every is {}: expected data.val_fraction above 0, which holds files "
        "out of training, or data.val_paths",
        train.validate_every));
  }
  data.check();
  config.optimizer.check();
  checkpoint.check();
  if (checkpoint.peer_copy && parallel.copies() == 1) {
    throw ConfigError(
        fmt::format("checkpoint.peer_copy is true: expected {} x parallel.cp of at least 2 with it",
                    parallel.learner_dp_key()));
  }
  model.check_training(int(parallel.tp), int(parallel.ep));
  check_stages(parallel, model);
  if (parallel.pp > 1) {
    check_gradient_window(parallel, model, schedule::parse_pipeline_kind(parallel.schedule));
    check_schedule(parallel, train);
  }
  check_codec(parallel, model);
  check_gradient_dtypes(train, parallel, config.optimizer.name, model);
  check_head_rows(train, parallel, model);
  check_patterns(config.optimizer, model);
}

bool TrainConfig::is_valid() const {
  try {
    check_config(*this);
  } catch (const Error&) {
    return false;
  }
  return true;
}

}  // namespace tandem
