#include "engine/plan/rank_state.h"

#include <algorithm>
#include <cmath>

namespace tandem::plan {
namespace {

/// Bytes of weights, gradients and moments of `weights` with that many replicas.
double state_bytes(const RunRow& row, double weights, double copies) {
  constexpr double kWeightsAndGradients = 6, kMoments = 12;
  if (row.sharding.find("FSDP") != std::string::npos)
    return weights * (kWeightsAndGradients + kMoments) / copies;
  return weights * (kWeightsAndGradients + kMoments / copies);
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

RankWeights rank_weights(const RunRow& row) {
  const MicrobatchDims dims = microbatch_dims(row);
  const double layers = stage_layers(row).fullest;
  const double attention = row.attention_weights > 0
                               ? row.attention_weights
                               : 2 * row.hidden * (dims.width + dims.kv_width);
  const double ffn = (1 + dims.matrices) * row.hidden * row.ffn;
  const double tables = row.pp > 1 || !row.gated ? 1 : 2;  // of a stage; tied unless gated
  const double vocabulary = row.vocab * row.hidden * tables;
  if (row.experts == 0) return {(layers * (attention + ffn) + vocabulary) / row.tp, 0};
  const double dense_layers = row.pp == 1 ? row.dense_layers : 0;  // of the fullest stage
  const double expert_layers = row.moe_layer_share * layers - dense_layers;
  const double dense_ffn = (1 + dims.matrices) * row.hidden * row.dense_ffn * dense_layers +
                           expert_layers * ffn * row.shared_experts;
  return {(layers * attention + dense_ffn + vocabulary) / row.tp,
          expert_layers * ffn * row.experts / row.ep / (row.experts_over_tp ? row.tp : 1)};
}

WeightCopies weight_copies(const RunRow& row) {
  const double replicas = row.dp * row.cp;
  return {replicas, std::max(1.0, replicas * (row.experts_over_tp ? 1 : row.tp) / row.ep)};
}

double saved_bytes(const RunRow& row) {
  constexpr double kElement = 2;
  const MicrobatchDims dims = microbatch_dims(row);
  return kElement * dims.tokens / row.tp *
         (6 * row.hidden + 2 * dims.kv_width + (1 + dims.matrices) * dims.ffn);
}

double saved_layers(const RunRow& row) {
  const double layers = stage_layers(row).fullest;
  if (row.pp == 1) return layers;
  const double interleaved = row.vpp > 1 ? 1 + (row.pp - 1) / (row.pp * row.vpp) : 1;
  return layers * std::min(row.pp * interleaved, row.microbatches());
}

double working_bytes(const RunRow& row) {
  constexpr double kLogits = 6, kGradient = 4, kOperands = 12, kWorkspace = kGiB;
  const MicrobatchDims dims = microbatch_dims(row);
  const double saved =
      row.recompute == "full" ? 2 * dims.tokens / row.tp * row.hidden : saved_bytes(row);
  const double logits = kLogits * dims.tokens * row.vocab / row.tp;
  const double backward =
      (kGradient * dims.matrices * row.hidden * row.ffn + kOperands * dims.tokens * dims.ffn) /
      row.tp;
  const double first = saved * saved_layers(row) + (row.pp > 1 ? backward : 0);
  const double last = saved * (row.pp > 1 ? stage_layers(row).last : saved_layers(row)) +
                      std::max(logits, backward);
  return std::max(first, last) + kWorkspace;
}

double peak_memory_gib(const RunRow& row) {
  const RankWeights weights = rank_weights(row);
  const WeightCopies copies = weight_copies(row);
  const double state = state_bytes(row, weights.dense, copies.dense) +
                       state_bytes(row, weights.experts, copies.experts);
  return (state + working_bytes(row)) / kGiB;
}

}  // namespace tandem::plan
