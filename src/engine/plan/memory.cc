#include "engine/plan/memory.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/machine.h"
#include "engine/model/codec_policy.h"
#include "engine/parallel/dims.h"
#include "engine/parallel/pipeline.h"
#include "tandem/error.h"

namespace tandem {
namespace {

/// Activation bytes per token: for every branch the residual stream before it, its norm, and its
/// two GEMMs' outputs and inputs, for experts times top k; for the head the logits and their
/// gradient.
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

/// Microbatches that a pipeline rank has saved activations of, mean of the ranks' highest numbers.
double microbatches_in_flight(const TrainConfig& config) {
  const schedule::PipelineShape shape = pipeline_shape(config);
  double sum = 0;
  for (int rank = 0; rank < shape.ranks; ++rank) {
    int now = 0, highest = 0;
    for (const schedule::PipelineAction& action : schedule::pipeline_actions(shape, rank)) {
      now += action.pass == schedule::PassKind::forward;
      highest = std::max(highest, now);
      now -= action.pass == schedule::PassKind::backward ||
             action.pass == schedule::PassKind::backward_weight;
    }
    sum += double(highest) / double(shape.chunks);
  }
  return sum / double(shape.ranks);
}

}  // namespace

// All f32. Each replica has weights and gradients, for training and for its validation model, of
// experts only an EP rank's share; the replicas share one pair of moments, and master weights if
// weight differences are sent. Each replica has its gradients' residuals of before and after a
// step.
double training_bytes(const TrainConfig& config) {
  // Pipeline stages share one model for training.
  const int64_t models = config.train.validate_every > 0 ? 1 + config.parallel.pp : 1;
  const auto experts = double(config.model.expert_parameters());
  const double dense = double(config.model.parameters()) - experts;
  const CodecPolicy codec = CodecPolicy::parse(config.parallel.codec);
  const bool has_residuals = !codec.gradients.is_exact() && config.parallel.error_feedback;
  const double shared = codec.weights.is_exact() ? 2 : 3;
  const auto copies = double((2 * models + 2 * has_residuals) * config.parallel.dp);
  return 4.0 *
         (dense * (copies + shared) + experts * (copies / double(config.parallel.ep) + shared));
}

double activation_bytes(const TrainConfig& config) {
  const auto& train = config.train;
  const double samples = train.microbatch > 0
                             ? double(train.microbatch) * double(config.parallel.dp)
                             : double(train.batch);
  return samples * double(train.seq) * token_bytes(config.model, train.dtype == "f32" ? 4 : 2) *
         microbatches_in_flight(config);
}

void check_memory(const TrainConfig& config, bool on_gpus) {
  const int ranks = ParallelDims(config).ranks();
  const double share = double(ranks_here(ranks)) / ranks;
  const double bytes = training_bytes(config) * share,
               activations = on_gpus ? 0 : activation_bytes(config) * share;
  const auto machine = double(this_machine().memory_bytes);
  if (machine == 0 || bytes + activations <= machine) return;
  throw ConfigError(fmt::format(
      "a model of {:.4g} M parameters on tp {} x dp {}{} ranks: its weights, gradients and moments "
      "need {:.3g} GB, and the activations of {} samples of {} tokens a rank {:.3g} GB: expected "
      "at "
      "most this machine's {:.3g} GB (fewer samples at once: train.microbatch)",
      double(config.model.parameters()) / 1e6, config.parallel.tp, config.parallel.dp,
      config.parallel.pp > 1 ? fmt::format(" x pp {}", config.parallel.pp) : "", bytes / 1e9,
      config.train.microbatch > 0 ? config.train.microbatch
                                  : config.train.batch / config.parallel.dp,
      config.train.seq, activations / 1e9, machine / 1e9));
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
