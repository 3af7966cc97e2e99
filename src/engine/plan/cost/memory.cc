#include "engine/plan/cost/memory.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/system/machine.h"
#include "engine/checkpoint/run/run_checkpoints.h"
#include "engine/model/gradient_memory.h"
#include "engine/model/program/cost.h"
#include "engine/model/quantized_operands.h"
#include "engine/parallel/message_ring.h"
#include "engine/parallel/pipeline.h"
#include "engine/parallel/sharded/weight_sync.h"
#include "engine/parallel/sync/outer_sync.h"
#include "engine/plan/cost/activations.h"
#include "engine/plan/cost/owned_fragments.h"
#include "engine/report/progress.h"
#include "tandem/error.h"

namespace tandem {
namespace {

/// Bytes a parameter of the validation model, in f32 with gradients; pipeline ranks have all of it.
constexpr double kValidationBytes = 8;

int count_snapshots(const CheckpointConfig& checkpoint, const CheckpointSchedule& schedule) {
  return schedule.is_periodic() ? schedule.generations() + (checkpoint.peer_copy ? 2 : 0) : 0;
}

}  // namespace

MemoryEstimate::MemoryEstimate(const TrainConfig& config, bool on_gpus)
    : model_(config.model),
      train_(config.train),
      parallel_(config.parallel),
      on_gpus_(on_gpus),
      dims_(config.parallel),
      codec_(CodecPolicy::parse(config.parallel.codec)),
      microbatch_(microbatch_size(config.parallel, config.train)),
      bucket_(bucket_elements(config.parallel, on_gpus)),
      window_(gradient_window(config.parallel, on_gpus)),
      shape_(pipeline_shape(config.parallel, config.train)),
      layers_(pipeline_layers(config.parallel, config.model.layers)),
      replicates_state_(config.parallel.replicates_state()),
      num_snapshots_(count_snapshots(config.checkpoint, CheckpointSchedule(config.checkpoint))) {
  for (int rank = 0; rank < dims_.pp(); ++rank) {
    activations_.push_back(rank_activation_bytes(config, rank, on_gpus));
    scratch_.push_back(rank_scratch_bytes(model_, parallel_, train_, rank, on_gpus));
  }
}

/// Share of the largest owner among `ranks` that have a copy of the same parameters: it has the
/// shards of one logical replica or several.
double MemoryEstimate::owned_share(int64_t ranks) const {
  const int64_t shards = dims_.num_gradients() * ranks / dims_.copies();
  return double((shards + ranks - 1) / ranks) / double(shards);
}

double MemoryEstimate::gradient_element() const {
  return double(size_of(parse_dtype(train_.gradient_dtype)));
}

StateBytes MemoryEstimate::state(int64_t replicas) const {
  const bool is_bf16 = train_.activation_dtype() == DType::bf16;
  const bool has_f32 = !is_bf16 || !codec_.weights.is_none();
  const bool has_masters = !has_f32 || WeightSync::sends_differences(int(replicas), codec_.weights);
  const bool has_residuals =
      replicas > 1 && !codec_.gradients.is_exact() && parallel_.error_feedback;
  StateBytes bytes;
  bytes.weights = (is_bf16 ? 2 : 0) + (has_f32 ? 4 : 0);
  const double share = owned_share(replicas);
  // Groups of ranks have copies of the state.
  const double copies = double(dims_.copies()) / double(dims_.state_shards());
  const double of_state = copies == 1 ? share : std::min(1.0, copies / double(replicas));
  const bool has_sums = dims_.rounds() > 1;  // beside the gradients of one replica
  bytes.gradients =
      parallel_.zero == 2 ? 4 * share : gradient_element() + (has_sums ? 4 * share : 0);
  bytes.optimizer = (has_masters ? 12.0 : 8.0) * of_state;
  bytes.residuals = has_residuals ? 8 : 0;  // those before and after a step
  bytes.outer = 4 * double(outer_moments(parallel_.sync).size()) * of_state;
  return bytes;
}

double MemoryEstimate::training_bytes() const {
  const auto experts = double(model_.expert_parameters());
  const double dense = double(model_.parameters()) - experts;
  const double validation = train_.validate_every > 0 ? kValidationBytes * dims_.pp() : 0;
  const auto of = [&](double parameters, int64_t replicas) {
    return parameters * double(replicas * dims_.learners()) *
           (state(replicas).total() + validation);
  };
  return of(dense, dims_.copies()) + of(experts, dims_.size(kExpertCopies));
}

ModelLayout MemoryEstimate::layout(int stage) const {
  return {model_, dims_.tp(), 0, {dims_.ep(), 0}, layers_[size_t(stage)]};
}

double MemoryEstimate::gradient_window_bytes(int pp_rank) const {
  if (!window_.dense || !window_.every_pass) return 0;
  const ModelLayout of_stage = layout(schedule::stage_of(shape_, pp_rank, 0));
  return 4.0 * double(assign_gradients(of_stage, model_, window_).elements);
}

/// Bytes of the messages of a rank with `parameters` to and from its replicas.
double MemoryEstimate::message_bytes(double parameters) const {
  const double ranks = dims_.copies();
  const double share = owned_share(dims_.copies());
  const auto buckets = int64_t(parameters / double(bucket_)) + 1;
  const auto ring = [&](bool is_staged, double element = 4) {
    const int window = MessageRing::max_window(buckets, bucket_, is_staged, on_gpus_);
    return element * std::min(double(bucket_) * window, parameters);
  };
  const bool sends_bf16 =
      train_.activation_dtype() == DType::bf16 && codec_.weights.is_none() && !replicates_state_;
  // Gradients of a window are copied when they are sent.
  const double copies = window_.dense ? 1 : 0;
  const double gradients = ring(copies > 0 || !codec_.gradients.is_none(), gradient_element());
  const double weights = ring(!codec_.weights.is_none());
  const double sent = gradients * (1 + copies) + weights * (sends_bf16 ? 0.5 : 1);
  const double shards = dims_.state_shards();  // gathered among the copies of their state
  const double gathered = shards > 1 && shards < ranks ? ring(false) / shards : 0;
  // Within a host and between hosts.
  const double host = dims_.host_copies();
  const double levels = host > 1 && host < ranks ? 1 + 1 / host : 1;
  return (ranks == 1 ? 0 : ranks * share * sent * levels) + gradients * copies * share + gathered;
}

double MemoryEstimate::exchange_bytes(int pp_rank) const {
  if (dims_.learners() == 1) return 0;
  std::vector<ModelLayout> stages;
  for (int chunk = 0; chunk < shape_.chunks; ++chunk) {
    stages.push_back(layout(schedule::stage_of(shape_, pp_rank, chunk)));
  }
  const ModelLayout whole(model_, dims_.tp(), 0, {dims_.ep(), 0});
  return largest_exchange_bytes(parallel_, whole, stages, bucket_).total();
}

/// Bytes that the products of a stage pack, of forward passes, of inputs' and of weights'
/// gradients.
PackedBytes MemoryEstimate::packing(const ModelLayout& layout) const {
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
  const int64_t tokens = microbatch_tokens(parallel_, train_);
  for (const BranchLayout& branch : layout.branches) {
    add(tokens, branch.in);
    add(tokens, branch.out);
    if (!branch.moe) continue;
    const int64_t ep = dims_.ep(), local = model_.experts / ep,
                  rows = std::max<int64_t>(1, tokens * ep * model_.top_k / model_.experts);
    for (const WeightMatrix& experts : {branch.experts_in, branch.experts_out}) {
      add(rows, {0, experts.rows / local, experts.columns});
    }
  }
  add(tokens, layout.head);
  return largest;
}

RankMemory MemoryEstimate::rank(int pp_rank, bool with_packing) const {
  double dense = 0, experts = 0, quantized = 0, sums = 0;
  PackedBytes packed;
  for (int chunk = 0; chunk < shape_.chunks; ++chunk) {
    const ModelLayout of_stage = layout(schedule::stage_of(shape_, pp_rank, chunk));
    experts += double(of_stage.experts().count);
    dense += double(of_stage.size - of_stage.experts().count);
    if (train_.is_fp8())
      quantized += quantized_bytes(of_stage, microbatch_tokens(parallel_, train_),
                                   train_.fp8_weight_gradients && parallel_.tp == 1, !on_gpus_);
    if (train_.gradient_dtype != "f32")
      sums += double(gradient_sum_bytes(of_stage, model_, parallel_.tp, train_.head_rows > 0));
    if (!with_packing || on_gpus_ || train_.dtype == "f32") continue;
    const PackedBytes of_chunk = packing(of_stage);
    packed = {std::max(packed.columns, of_chunk.columns), std::max(packed.rows, of_chunk.rows)};
  }
  const auto all_experts = double(model_.expert_parameters());
  const double validated = (double(model_.parameters()) - all_experts) / double(parallel_.tp) +
                           all_experts / double(parallel_.tp * parallel_.ep);
  RankMemory memory;
  memory.state = dense * state(dims_.copies()).total() +
                 experts * state(dims_.size(kExpertCopies)).total() + quantized + sums +
                 (train_.validate_every > 0 ? kValidationBytes * validated : 0);
  memory.messages = message_bytes(dense + experts) + gradient_window_bytes(pp_rank);
  memory.exchanges = exchange_bytes(pp_rank);
  memory.activations = activations_[size_t(pp_rank)];
  memory.scratch = scratch_[size_t(pp_rank)];
  memory.packing = double(packed.columns + packed.rows);
  const bool has_f32 = train_.activation_dtype() == DType::f32 || !codec_.weights.is_none();
  const bool holds_new_weights =
      !window_.dense && !window_.experts && train_.gradient_dtype == "f32";  // as gradients
  memory.staging = on_gpus_ || has_f32 || holds_new_weights ? 0 : 4 * (dense + experts);
  return memory;
}

double MemoryEstimate::activation_bytes() const {
  double bytes = 0;
  for (const double of_stage : activations_) bytes += of_stage;
  return bytes * double(parallel_.tp * parallel_.cp * parallel_.dp);
}

RankMemory MemoryEstimate::largest_rank(bool with_packing) const {
  RankMemory largest;
  constexpr double kAnyMachine = 1e14;  // offsets in the weights of larger ranks may overflow
  const double mean = training_bytes() / dims_.ranks();
  if (mean > kAnyMachine) {
    largest.state = mean;
    return largest;
  }
  for (int pp_rank = 0; pp_rank < dims_.pp(); ++pp_rank) {
    const RankMemory memory = rank(pp_rank, with_packing);
    if (memory.total() > largest.total()) largest = memory;
  }
  return largest;
}

double MemoryEstimate::checkpoint_bytes() const {
  const auto of = [&](double parameters, int64_t replicas) {
    const bool has_differences = replicas > 1 && !codec_.weights.is_exact();
    // Weights, both moments and masters; residuals of every replica.
    const double of_learner = (has_differences ? 16 : 12) +
                              double(replicas) * state(replicas).residuals / 2 +
                              4 * double(outer_moments(parallel_.sync).size());
    return parameters * dims_.learners() * of_learner;
  };
  const auto experts = double(model_.expert_parameters());
  return of(double(model_.parameters()) - experts, dims_.copies()) +
         of(experts, dims_.size(kExpertCopies));
}

std::string MemoryEstimate::describe_recompute() const {
  if (train_.recompute == "none") return "";
  return fmt::format(", with train.recompute \"{}\"{}", train_.recompute,
                     train_.recompute_layers == 0
                         ? ""
                         : fmt::format(" in {} layers of a stage", train_.recompute_layers));
}

/// "12.0 GB, 9.1 GB of state, 0 bytes of messages, …"
std::string MemoryEstimate::describe(const RankMemory& memory) const {
  return fmt::format(
             "{}, {} of state, {} of messages{}, {} of activations{}, {} of scratch{}",
             format_bytes(memory.total()), format_bytes(memory.state),
             format_bytes(memory.messages),
             memory.exchanges > 0 ? fmt::format(", {} of exchanges", format_bytes(memory.exchanges))
                                  : "",
             format_bytes(memory.activations), describe_recompute(), format_bytes(memory.scratch),
             memory.packing > 0
                 ? fmt::format(", {} of packed operands", format_bytes(memory.packing))
                 : "") +
         (memory.staging > 0
              ? fmt::format(", before them {} of new weights", format_bytes(memory.staging))
              : "");
}

std::string MemoryEstimate::describe() const {
  const StateBytes bytes = state(dims_.copies());
  std::string terms = fmt::format("{} weights + {:.3g} gradients + {:.3g} optimizer", bytes.weights,
                                  bytes.gradients, bytes.optimizer);
  if (bytes.residuals > 0) terms += fmt::format(" + {} error feedback", bytes.residuals);
  if (bytes.outer > 0) terms += fmt::format(" + {:.3g} exchanges of learners", bytes.outer);
  const double snapshots = snapshot_bytes() / dims_.ranks();
  return fmt::format(
      "expected memory: {:.3g} bytes a parameter and rank ({}); {}: {}{}", bytes.total(), terms,
      dims_.pp() == 1 ? "a rank" : "the rank that needs most",
      describe(largest_rank(uses_packing())),
      snapshots > 0 ? fmt::format(", {} of snapshots", format_bytes(snapshots)) : "");
}

void MemoryEstimate::check_gpu(double gpu_bytes, const std::string& gpu) const {
  RankMemory memory = largest_rank(false);
  if (model_.experts > 0) memory.activations = 0;
  if (gpu_bytes == 0 || memory.total() <= gpu_bytes) return;
  throw ConfigError(
      fmt::format("a rank needs {}: expected at most {} of {} (less: train.recompute, a smaller "
                  "train.microbatch, train.gradient_dtype, train.head_rows, more tp or pp)",
                  describe(memory), format_bytes(gpu_bytes), gpu));
}

void MemoryEstimate::check() const {
  const int ranks = dims_.ranks();
  const double share = double(ranks_here(ranks)) / ranks;
  const double packing = largest_rank(uses_packing()).packing,
               buffers = shape_.chunks * context_attention_bytes(model_, parallel_, train_);
  const double bytes = on_gpus_ ? 0 : training_bytes() * share,
               activations =
                   on_gpus_ ? 0 : (activation_bytes() + (packing + buffers) * ranks) * share,
               snapshots = snapshot_bytes() * share;
  const auto machine = double(this_machine().memory_bytes);
  if (machine == 0 || bytes + activations + snapshots <= machine) return;
  if (on_gpus_) {
    throw ConfigError(fmt::format(
        "checkpoint: snapshots need {:.3g} GB: expected at most this machine's {:.3g} GB",
        snapshots / 1e9, machine / 1e9));
  }
  throw ConfigError(fmt::format(
      "a model of {:.4g} M parameters on tp {}{} x dp {}{} ranks: its weights, gradients and "
      "moments "
      "need {:.3g} GB, and the activations of {} samples of {} tokens a rank {:.3g} GB{}: expected "
      "at "
      "most this machine's {:.3g} GB (fewer samples at once: train.microbatch; or "
      "train.recompute)",
      double(model_.parameters()) / 1e6, dims_.tp(),
      dims_.cp() > 1 ? fmt::format(" x cp {}", dims_.cp()) : "", dims_.dp() * dims_.learners(),
      dims_.pp() > 1 ? fmt::format(" x pp {}", dims_.pp()) : "", bytes / 1e9, microbatch_,
      microbatch_tokens(parallel_, train_) / microbatch_, activations / 1e9,
      snapshots > 0 ? fmt::format(", snapshots for checkpoints {:.3g} GB", snapshots / 1e9) : "",
      machine / 1e9));
}

void check_memory(const ModelConfig& model, const EvaluateOptions& options) {
  const int64_t seq = options.seq == 0 ? model.max_seq : options.seq;
  const double element = options.dtype == DType::f32 ? 4 : 2;
  const double weights = 4.0 * double(model.parameters());
  const double token = program::layer_bytes({model, 1, 1, 1, element, false}) +
                       double(model.vocab) * (4 + element);  // logits and their gradient
  const double windows =
      double(options.batch) * double(seq) * token + 4.0 * double(seq) * double(model.head_dim);
  const auto machine = double(this_machine().memory_bytes);
  if (machine == 0 || weights + windows <= machine) return;
  throw InvalidArgument(fmt::format(
      "a model of {:.4g} M parameters needs {:.3g} GB, and {} windows of {} tokens {:.3g} GB: "
      "expected at most this machine's {:.3g} GB (--seq, --batch)",
      double(model.parameters()) / 1e6, weights / 1e9, options.batch, seq, windows / 1e9,
      machine / 1e9));
}

}  // namespace tandem
