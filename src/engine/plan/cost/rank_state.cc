#include "engine/plan/cost/rank_state.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <string_view>
#include <tuple>

#include "engine/plan/cost/activations.h"
#include "schedule/pipeline_simulation.h"

namespace tandem::plan {
namespace {

/// Bytes of weights, gradients and moments of `weights` with that many replicas.
double state_bytes(const RunRow& row, double weights, double copies) {
  constexpr double kWeightsAndGradients = 6, kMoments = 12;
  if (row.sharding.find("FSDP") != std::string::npos)
    return weights * (kWeightsAndGradients + kMoments) / copies;
  return weights * (kWeightsAndGradients + kMoments / copies);
}

/// Highest numbers of microbatches in flight of a rank's interleaved stages together. From 2 p
/// microbatches on they do not depend on their number.
double saved_by_stages(const RunRow& row) {
  static thread_local std::map<std::tuple<int, int, int>, double> known;
  schedule::PipelineShape shape = pipeline_shape_of(row);
  shape.microbatches = std::min(shape.microbatches, 2 * shape.ranks);
  const auto [found, is_new] =
      known.try_emplace({shape.ranks, shape.chunks, shape.microbatches}, 0);
  if (!is_new) return found->second;
  std::vector<int> now(size_t(shape.chunks)), highest(now);
  for (const schedule::PipelineAction& action : pipeline_actions(shape, 0)) {
    int& saved = now[size_t(action.chunk)];
    saved += action.pass == schedule::PassKind::forward ? 1 : -1;
    highest[size_t(action.chunk)] = std::max(highest[size_t(action.chunk)], saved);
  }
  return found->second = std::accumulate(highest.begin(), highest.end(), 0.0);
}

/// Gradients that a rank keeps for weight gradients to come: of each GEMM's output; with
/// recomputation the GEMM's input, too. In zb-h1 the last rank's are those of the head, too.
double pending_bytes(const RunRow& row) {
  constexpr double kElement = 2;
  const MicrobatchDims dims = microbatch_dims(row);
  const double gradients =
      2 * row.hidden + (dims.width + 2 * dims.kv_width + dims.matrices * dims.ffn) / row.tp;
  const double inputs =
      row.recompute == "full" ? (2 * row.hidden + dims.width + dims.ffn) / row.tp : 0;
  const double microbatches = split_schedule(row.schedule, int(row.pp), 0).pending;
  const double logits = row.schedule == schedule::PipelineKind::zb_h1 ? row.vocab / row.tp : 0;
  return kElement * dims.tokens * microbatches *
         (stage_layers(row).fullest * (gradients + inputs) + logits);
}

/// Microbatches of which the rank of the last stage saves activations if the embedding is tied: of
/// all of its stages together, and of the last one, whose logits are saved, too.
struct TiedFlight {
  int all = 0, last = 0;
};
/// From 4 p microbatches on they do not depend on their number.
TiedFlight tied_flight(const RunRow& row) {
  static thread_local std::map<std::tuple<schedule::PipelineKind, int, int, int>, TiedFlight> known;
  schedule::PipelineShape shape = pipeline_shape_of(row);
  shape.microbatches = std::min(shape.microbatches, 4 * shape.ranks);
  const auto [found, is_new] =
      known.try_emplace({shape.kind, shape.ranks, shape.chunks, shape.microbatches});
  TiedFlight& flight = found->second;
  if (!is_new) return flight;
  const int last = shape.stages() - 1, rank = schedule::position_of(shape, last).rank;
  flight.last = saved_microbatches(shape, last, true);
  for (int chunk = 0; chunk < shape.chunks; ++chunk) {
    flight.all += saved_microbatches(shape, schedule::stage_of(shape, rank, chunk), true);
  }
  return flight;
}

}  // namespace

MicrobatchDims microbatch_dims(const RunRow& row) {
  const double experts = row.experts > 0 ? row.top_k + row.shared_experts : 1;
  return {row.mbs * row.seq / row.cp, row.heads * row.head_dim, row.kv_heads * row.head_dim,
          row.ffn * experts, row.gated ? 2.0 : 1.0};
}

StageLayers stage_layers(const RunRow& row) {
  const double mean = row.layers / row.pp;
  if (row.pp == 1 || std::fmod(row.layers, row.pp) == 0) return {mean, mean, mean};
  const double fullest = std::ceil((row.layers + 2) / row.pp);
  return {mean, fullest, fullest - 1};
}

double vocabulary_tables(const RunRow& row) {
  return row.pp > 1 || !row.gated || row.tied_embeddings ? 1 : 2;
}

RankWeights rank_weights(const RunRow& row) {
  const MicrobatchDims dims = microbatch_dims(row);
  const double layers = stage_layers(row).fullest;
  const double attention = row.attention_weights > 0
                               ? row.attention_weights
                               : 2 * row.hidden * (dims.width + dims.kv_width);
  const double ffn = (1 + dims.matrices) * row.hidden * row.ffn;
  const double vocabulary = row.vocab * row.hidden * vocabulary_tables(row);
  if (row.experts == 0) return {(layers * (attention + ffn) + vocabulary) / row.tp, 0};
  const double dense_layers = row.pp == 1 ? row.dense_layers : 0;  // of the fullest stage
  const double expert_layers = row.moe_layer_share * layers - dense_layers;
  const double dense_ffn = (1 + dims.matrices) * row.hidden * row.dense_ffn * dense_layers +
                           expert_layers * ffn * row.shared_experts;
  return {(layers * attention + dense_ffn + vocabulary) / row.tp,
          expert_layers * ffn * row.experts / row.ep / (row.of_engine ? row.tp : 1)};
}

double context_bytes(const RunRow& row) {
  if (row.cp == 1 || !row.of_engine) return 0;
  constexpr double kKey = 2, kGradient = 4, kCalls = 2;
  const double elements = 2 * row.mbs * row.seq * row.kv_heads * row.head_dim / row.tp;
  return std::max(1.0, row.vpp) * kCalls * elements * (kKey + 2 * kGradient);
}

WeightCopies weight_copies(const RunRow& row) {
  const double replicas = row.dp * row.cp;
  return {replicas, std::max(1.0, replicas * (row.of_engine ? 1 : row.tp) / row.ep)};
}

schedule::PipelineShape pipeline_shape_of(const RunRow& row) {
  using schedule::PipelineKind;
  const bool interleaved = row.schedule == PipelineKind::one_f_one_b && row.vpp > 1;
  return {interleaved ? PipelineKind::interleaved : row.schedule, int(row.pp),
          int(row.microbatches()), int(std::max(1.0, row.vpp))};
}

SplitSchedule split_schedule(schedule::PipelineKind kind, int ranks, double recompute) {
  using schedule::PassKind;
  static thread_local std::map<std::tuple<schedule::PipelineKind, int, double>, SplitSchedule>
      known;
  const auto [found, is_new] = known.try_emplace({kind, ranks, recompute});
  SplitSchedule& split = found->second;
  if (!is_new) return split;
  const schedule::PipelineShape shape{kind, ranks, 2 * ranks, min_chunks(kind)};
  const auto actions = pipeline_actions(shape);
  const schedule::PassCosts costs{.recompute = recompute};
  const double busy = shape.microbatches * shape.chunks *
                      (costs.of(PassKind::forward) + costs.of(PassKind::backward));
  split.idle = (simulate(shape, actions, costs).makespan - busy) / shape.chunks;
  for (const auto& of_rank : actions) {
    int saved = 0, pending = 0;
    for (const schedule::PipelineAction& action : of_rank) {
      saved += action.pass == PassKind::forward;
      pending += action.pass == PassKind::backward_input;
      split.saved = std::max(split.saved, double(saved) / shape.chunks);
      split.pending = std::max(split.pending, double(pending) / shape.chunks);
      saved -= action.pass == PassKind::backward || action.pass == PassKind::backward_weight;
      pending -= action.pass == PassKind::backward_weight;
    }
  }
  return split;
}

double saved_bytes(const RunRow& row) {
  constexpr double kElement = 2;
  const MicrobatchDims dims = microbatch_dims(row);
  const auto recomputes = [&](std::string_view what) {
    return row.recompute.find(what) != std::string::npos;
  };
  // Outputs of the two norms and of the FFN's activation.
  const bool has_cheap = !recomputes("selective") && !recomputes("norm");
  const bool has_ffn = row.experts == 0 || !recomputes("moe");
  const double ffn = has_ffn ? (dims.matrices + (has_cheap ? 1 : 0)) * dims.ffn : 0;
  return kElement * dims.tokens / row.tp *
         ((has_cheap ? 6 : 4) * row.hidden + 2 * dims.kv_width + ffn);
}

double saved_layers(const RunRow& row) {
  const double layers = stage_layers(row).fullest;
  if (row.pp == 1) return layers;
  if (splits_backward(row.schedule))
    return layers * split_schedule(row.schedule, int(row.pp), 0).saved;
  if (row.of_engine && row.vpp > 1) return layers * saved_by_stages(row) / row.vpp;
  const double interleaved = row.vpp > 1 ? 1 + (row.pp - 1) / (row.pp * row.vpp) : 1;
  return layers * std::min(row.pp * interleaved, row.microbatches());
}

double working_bytes(const RunRow& row) {
  constexpr double kLogits = 6, kGradient = 4, kOperands = 12;
  const double workspace = kGiB + context_bytes(row);
  const MicrobatchDims dims = microbatch_dims(row);
  const bool recomputes = row.recompute == "full";
  // The engine keeps the residual stream in f32, and memory to recompute a layer of each stage.
  const double residual = (row.of_engine ? 4 : 2) * dims.tokens / row.tp * row.hidden;
  const double saved = recomputes ? residual : saved_bytes(row);
  const double recomputed = recomputes && row.of_engine ? row.vpp * saved_bytes(row) : 0;
  const double logits = kLogits * dims.tokens * row.vocab / row.tp;
  const double backward = std::max(recomputed, (kGradient * dims.matrices * row.hidden * row.ffn +
                                                kOperands * dims.tokens * dims.ffn) /
                                                   row.tp);
  const bool is_split = row.pp > 1 && splits_backward(row.schedule);
  const double pending = is_split ? pending_bytes(row) : 0;
  double tied = 0;
  if (row.pp > 1 && row.of_engine && row.tied_embeddings) {
    constexpr double kSavedLogits = 2;
    const TiedFlight flight = tied_flight(row);
    tied = saved * stage_layers(row).last * flight.all / std::max(1.0, row.vpp) +
           flight.last * logits * kSavedLogits / kLogits + pending +
           std::max(logits * (1 - kSavedLogits / kLogits), backward);
  }
  if (is_split) {
    return std::max(tied, saved * saved_layers(row) + pending + std::max(logits, backward)) +
           workspace;
  }
  const double first = saved * saved_layers(row) + (row.pp > 1 ? backward : 0);
  const double last = saved * (row.pp > 1 ? stage_layers(row).last : saved_layers(row)) +
                      std::max(logits, backward);
  return std::max({first, last, tied}) + workspace;
}

double peak_memory_gib(const RunRow& row) {
  const RankWeights weights = rank_weights(row);
  const WeightCopies copies = weight_copies(row);
  const double state = state_bytes(row, weights.dense, copies.dense) +
                       state_bytes(row, weights.experts, copies.experts);
  return (state + working_bytes(row)) / kGiB;
}

}  // namespace tandem::plan
