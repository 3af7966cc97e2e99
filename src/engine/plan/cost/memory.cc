#include "engine/plan/cost/memory.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "core/system/machine.h"
#include "engine/checkpoint/run/run_checkpoints.h"
#include "engine/model/codec_policy.h"
#include "engine/model/gradient_memory.h"
#include "engine/parallel/dims.h"
#include "engine/parallel/message_ring.h"
#include "engine/parallel/pipeline.h"
#include "engine/parallel/sharded/weight_sync.h"
#include "engine/plan/cost/activations.h"
#include "engine/report/progress.h"
#include "gemm/packed_bytes.h"
#include "tandem/error.h"

namespace tandem {
namespace {

/// Bytes a parameter of the validation model, in f32 with gradients; pipeline ranks have all of it.
constexpr double kValidationBytes = 8;

/// Activation bytes per token of an evaluated model: for every branch the residual stream before
/// it, its norm, and its two GEMMs' outputs and inputs, for experts times top k; for the head the
/// logits and their gradient.
double token_bytes(const ModelConfig& model, double element) {
  const double q = double(model.heads) * double(model.head_dim),
               kv = double(model.kv_heads) * double(model.head_dim), ffn = double(model.ffn);
  const double branches = model.parallel_block ? 1 : 2;
  const double of_layer =
      branches * double(model.hidden) * (4 + element) + (q + 2 * kv + 2 * ffn + q + ffn) * element;
  const double of_experts =
      double(model.top_k) * double(model.hidden + 3 * model.ffn_per_expert()) * element;
  return double(model.layers) * of_layer + double(model.moe_layers()) * of_experts +
         double(model.vocab) * (4 + element);
}

/// Share of the largest owner among `ranks` that have a copy of the same parameters: it has the
/// shards of one logical replica or several.
double owned_share(const TrainConfig& config, int64_t ranks) {
  const int64_t shards = config.parallel.logical_replicas() * ranks / config.parallel.dp;
  return double((shards + ranks - 1) / ranks) / double(shards);
}

}  // namespace

StateBytes state_bytes(const TrainConfig& config, int64_t replicas) {
  const CodecPolicy codec = CodecPolicy::parse(config.parallel.codec);
  const bool is_bf16 = config.train.dtype == "bf16";
  const bool has_f32 = !is_bf16 || !codec.weights.is_none();
  const bool has_masters = !has_f32 || WeightSync::sends_differences(int(replicas), codec.weights);
  const bool has_residuals =
      replicas > 1 && !codec.gradients.is_exact() && config.parallel.error_feedback;
  StateBytes bytes;
  bytes.weights = (is_bf16 ? 2 : 0) + (has_f32 ? 4 : 0);
  const double share = owned_share(config, replicas);
  // Groups of ranks have copies of the state.
  const double copies = double(config.parallel.dp) / double(config.parallel.state_shards());
  const double of_state = copies == 1 ? share : std::min(1.0, copies / double(replicas));
  const bool has_sums =
      ParallelDims(config.parallel).rounds() > 1;  // beside the gradients of one replica
  bytes.gradients = config.parallel.zero == 2 ? 4 * share : 4 + (has_sums ? 4 * share : 0);
  bytes.optimizer = (has_masters ? 12.0 : 8.0) * of_state;
  bytes.residuals = has_residuals ? 8 : 0;  // those before and after a step
  return bytes;
}

double training_bytes(const TrainConfig& config) {
  const auto& parallel = config.parallel;
  const int64_t expert_replicas = ParallelDims(config.parallel).size(kExpertDp);
  const auto experts = double(config.model.expert_parameters());
  const double dense = double(config.model.parameters()) - experts;
  const double validation =
      config.train.validate_every > 0 ? kValidationBytes * double(parallel.pp) : 0;
  const auto of = [&](double parameters, int64_t replicas) {
    return parameters * double(replicas) * (state_bytes(config, replicas).total() + validation);
  };
  return of(dense, parallel.dp) + of(experts, expert_replicas);
}

double gradient_window_bytes(const TrainConfig& config, bool on_gpus, int pp_rank) {
  const auto& parallel = config.parallel;
  const GradientWindow window = gradient_window(config.parallel, on_gpus);
  if (!window.dense || !window.every_pass) return 0;
  const int stage = schedule::stage_of(pipeline_shape(config.parallel, config.train), pp_rank, 0);
  const ModelLayout layout(config.model, int(parallel.tp), 0, {int(parallel.ep), 0},
                           pipeline_layers(config.parallel, config.model.layers)[size_t(stage)]);
  return 4.0 * double(assign_gradients(layout, config.model, window).elements);
}

namespace {

/// Bytes of the messages of a rank with `parameters` to and from its replicas.
double message_bytes(const TrainConfig& config, double parameters, bool on_gpus) {
  const auto ranks = double(config.parallel.dp);
  const double share = owned_share(config, config.parallel.dp);
  const CodecPolicy codec = CodecPolicy::parse(config.parallel.codec);
  const int64_t bucket = bucket_elements(config.parallel, on_gpus);
  const auto buckets = int64_t(parameters / double(bucket)) + 1;
  const auto ring = [&](bool is_staged) {
    const int window = MessageRing::max_window(buckets, bucket, is_staged, on_gpus);
    return 4 * std::min(double(bucket) * window, parameters);
  };
  const bool sends_bf16 = config.train.dtype == "bf16" && codec.weights.is_none() &&
                          !config.parallel.replicates_state();
  // Gradients of a window are copied when they are sent.
  const double copies = gradient_window(config.parallel, on_gpus).dense ? 1 : 0;
  const double gradients = ring(copies > 0 || !codec.gradients.is_none());
  const double weights = ring(!codec.weights.is_none());
  const double sent = gradients * (1 + copies) + weights * (sends_bf16 ? 0.5 : 1);
  const auto shards =
      double(config.parallel.state_shards());  // gathered among the copies of their state
  const double gathered = shards > 1 && shards < ranks ? ring(false) / shards : 0;
  // Within a host and between hosts.
  const double host = ParallelDims(config.parallel).host_replicas();
  const double levels = host > 1 && host < ranks ? 1 + 1 / host : 1;
  return (ranks == 1 ? 0 : ranks * share * sent * levels) + gradients * copies * share + gathered;
}

/// Bytes that the products of a stage pack, of forward passes, of inputs' and of weights'
/// gradients.
PackedBytes packing_of(const TrainConfig& config, const ModelLayout& layout) {
  PackedBytes largest;
  const auto add = [&](int64_t tokens, const WeightMatrix& matrix) {
    if (matrix.rows == 0) return;
    const auto of = [](int64_t rows, int64_t columns) {
      return Tensor(nullptr, DType::bf16, {rows, columns});
    };
    const Tensor x = of(tokens, matrix.columns), dy = of(tokens, matrix.rows),
                 weight = of(matrix.rows, matrix.columns);
    for (const PackedBytes& each : {packed_bytes(x, weight.transposed()), packed_bytes(dy, weight),
                                    packed_bytes(dy.transposed(), x)}) {
      largest = {std::max(largest.columns, each.columns), std::max(largest.rows, each.rows)};
    }
  };
  const ModelConfig& model = config.model;
  const int64_t tokens = microbatch_size(config.parallel, config.train) * config.train.seq;
  for (const BranchLayout& branch : layout.branches) {
    add(tokens, branch.in);
    add(tokens, branch.out);
    if (!branch.moe) continue;
    const int64_t ep = config.parallel.ep, local = model.experts / ep,
                  rows = std::max<int64_t>(1, tokens * ep * model.top_k / model.experts);
    for (const WeightMatrix& experts : {branch.experts_in, branch.experts_out}) {
      add(rows, {0, experts.rows / local, experts.columns});
    }
  }
  add(tokens, layout.head);
  return largest;
}

RankMemory rank_memory(const TrainConfig& config, int pp_rank, bool on_gpus, bool with_packing) {
  const auto& parallel = config.parallel;
  const schedule::PipelineShape shape = pipeline_shape(config.parallel, config.train);
  const std::vector<StageLayers> layers = pipeline_layers(config.parallel, config.model.layers);
  double dense = 0, experts = 0;
  PackedBytes packed;
  for (int chunk = 0; chunk < shape.chunks; ++chunk) {
    const int stage = schedule::stage_of(shape, pp_rank, chunk);
    const ModelLayout layout(config.model, int(parallel.tp), 0, {int(parallel.ep), 0},
                             layers[size_t(stage)]);
    experts += double(layout.experts().count);
    dense += double(layout.size - layout.experts().count);
    if (!with_packing || on_gpus || config.train.dtype == "f32") continue;
    const PackedBytes of_chunk = packing_of(config, layout);
    packed = {std::max(packed.columns, of_chunk.columns), std::max(packed.rows, of_chunk.rows)};
  }
  const auto all_experts = double(config.model.expert_parameters());
  const double validated = (double(config.model.parameters()) - all_experts) / double(parallel.tp) +
                           all_experts / double(parallel.tp * parallel.ep);
  RankMemory memory;
  memory.state =
      dense * state_bytes(config, parallel.dp).total() +
      experts * state_bytes(config, ParallelDims(config.parallel).size(kExpertDp)).total() +
      (config.train.validate_every > 0 ? kValidationBytes * validated : 0);
  memory.messages = message_bytes(config, dense + experts, on_gpus) +
                    gradient_window_bytes(config, on_gpus, pp_rank);
  memory.activations = rank_activation_bytes(config, pp_rank, on_gpus);
  memory.packing = double(packed.columns + packed.rows);
  return memory;
}

}  // namespace

RankMemory largest_rank_memory(const TrainConfig& config, bool on_gpus, bool with_packing) {
  RankMemory largest;
  constexpr double kAnyMachine = 1e14;  // offsets in the weights of larger ranks may overflow
  const double mean = training_bytes(config) / ParallelDims(config.parallel).ranks();
  if (mean > kAnyMachine) {
    largest.state = mean;
    return largest;
  }
  for (int pp_rank = 0; pp_rank < int(config.parallel.pp); ++pp_rank) {
    const RankMemory memory = rank_memory(config, pp_rank, on_gpus, with_packing);
    if (memory.total() > largest.total()) largest = memory;
  }
  return largest;
}

double checkpoint_bytes(const TrainConfig& config) {
  const auto of = [&](double parameters, int64_t replicas) {
    const bool has_differences =
        replicas > 1 && !CodecPolicy::parse(config.parallel.codec).weights.is_exact();
    // Weights, both moments and masters; residuals of every replica.
    return parameters * ((has_differences ? 16 : 12) +
                         double(replicas) * state_bytes(config, replicas).residuals / 2);
  };
  const auto experts = double(config.model.expert_parameters());
  return of(double(config.model.parameters()) - experts, config.parallel.dp) +
         of(experts, ParallelDims(config.parallel).size(kExpertDp));
}

double snapshot_bytes(const TrainConfig& config) {
  const CheckpointSchedule schedule(config.checkpoint);
  if (!schedule.is_periodic()) return 0;
  return (schedule.generations() + (config.checkpoint.peer_copy ? 2 : 0)) *
         checkpoint_bytes(config);
}

namespace {

std::string describe_recompute(const TrainConfig& config) {
  const auto& train = config.train;
  if (train.recompute == "none") return "";
  return fmt::format(", with train.recompute \"{}\"{}", train.recompute,
                     train.recompute_layers == 0
                         ? ""
                         : fmt::format(" in {} layers of a stage", train.recompute_layers));
}

}  // namespace

std::string describe_memory(const TrainConfig& config, bool on_gpus) {
  const StateBytes bytes = state_bytes(config, config.parallel.dp);
  std::string terms = fmt::format("{} weights + {:.3g} gradients + {:.3g} optimizer", bytes.weights,
                                  bytes.gradients, bytes.optimizer);
  if (bytes.residuals > 0) terms += fmt::format(" + {} error feedback", bytes.residuals);
  const int ranks = ParallelDims(config.parallel).ranks();
  const double snapshots = snapshot_bytes(config) / ranks;
  const RankMemory memory = largest_rank_memory(config, on_gpus, uses_packing());
  return fmt::format(
      "expected memory: {:.3g} bytes a parameter and rank ({}); {}: {} of state, {} of "
      "messages, {} of activations{}{}{}",
      bytes.total(), terms, config.parallel.pp == 1 ? "a rank" : "the rank that needs most",
      format_bytes(memory.state), format_bytes(memory.messages), format_bytes(memory.activations),
      describe_recompute(config),
      memory.packing > 0 ? fmt::format(", {} of packed operands", format_bytes(memory.packing))
                         : "",
      snapshots > 0 ? fmt::format(", {} of snapshots", format_bytes(snapshots)) : "");
}

void check_memory(const TrainConfig& config, bool on_gpus) {
  const int ranks = ParallelDims(config.parallel).ranks();
  const double share = double(ranks_here(ranks)) / ranks;
  const double packing = largest_rank_memory(config, on_gpus, uses_packing()).packing;
  const double bytes = training_bytes(config) * share,
               activations = on_gpus ? 0 : (activation_bytes(config) + packing * ranks) * share,
               snapshots = snapshot_bytes(config) * share;
  const auto machine = double(this_machine().memory_bytes);
  if (machine == 0 || bytes + activations + snapshots <= machine) return;
  throw ConfigError(fmt::format(
      "a model of {:.4g} M parameters on tp {} x dp {}{} ranks: its weights, gradients and moments "
      "need {:.3g} GB, and the activations of {} samples of {} tokens a rank {:.3g} GB{}: expected "
      "at "
      "most this machine's {:.3g} GB (fewer samples at once: train.microbatch; or "
      "train.recompute)",
      double(config.model.parameters()) / 1e6, config.parallel.tp, config.parallel.dp,
      config.parallel.pp > 1 ? fmt::format(" x pp {}", config.parallel.pp) : "", bytes / 1e9,
      microbatch_size(config.parallel, config.train), config.train.seq, activations / 1e9,
      snapshots > 0 ? fmt::format(", snapshots for checkpoints {:.3g} GB", snapshots / 1e9) : "",
      machine / 1e9));
}

void check_memory(const ModelConfig& model, const EvaluateOptions& options) {
  const int64_t seq = options.seq == 0 ? model.max_seq : options.seq;
  const double element = options.dtype == DType::f32 ? 4 : 2;
  const double weights = 4.0 * double(model.parameters());
  const double windows = double(options.batch) * double(seq) * token_bytes(model, element) +
                         4.0 * double(seq) * double(model.head_dim);
  const auto machine = double(this_machine().memory_bytes);
  if (machine == 0 || weights + windows <= machine) return;
  throw InvalidArgument(fmt::format(
      "a model of {:.4g} M parameters needs {:.3g} GB, and {} windows of {} tokens {:.3g} GB: "
      "expected at most this machine's {:.3g} GB (--seq, --batch)",
      double(model.parameters()) / 1e6, weights / 1e9, options.batch, seq, windows / 1e9,
      machine / 1e9));
}

}  // namespace tandem
