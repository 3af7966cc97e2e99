// Memory of a rank of a run: layers, weights, saved activations and their peak.
#pragma once

#include "engine/plan/cost/gpu_spec.h"
#include "engine/plan/fit/run_rows.h"

namespace tandem::plan {

/// Dimensions of a microbatch on the ranks of a TP group.
struct MicrobatchDims {
  double tokens = 0;
  double width = 0, kv_width = 0;  ///< columns of the queries, of the keys
  double ffn = 0;                  ///< columns of a token's FFN, of all its experts
  double matrices = 1;             ///< into the FFN; 2 if gated
};
MicrobatchDims microbatch_dims(const RunRow& row);

/// Layers of a rank: on average, on the fullest stage, and on the last, which has the head too.
/// Where stages do not divide the layers, embedding and head count as one each.
struct StageLayers {
  double mean = 0, fullest = 0, last = 0;
};
StageLayers stage_layers(const RunRow& row);

/// Tables of the vocabulary that a rank of the fullest stage has, embedding or head. Models without
/// gates tie them.
double vocabulary_tables(const RunRow& row);

/// Weights of a rank of the fullest stage.
struct RankWeights {
  double dense = 0, experts = 0;
};
RankWeights rank_weights(const RunRow& row);

/// Ranks that have copies of a rank's dense weights, and of its experts.
struct WeightCopies {
  double dense = 1, experts = 1;
};
/// Bytes of the engine's context-parallel attention: two calls' keys and values of whole sequences
/// in bf16, and gradients in f32 that a rank computes and receives, for each of its stages
/// (overlap/attention). 0 for other engines' runs, and without context parallelism.
double context_bytes(const RunRow& row);

WeightCopies weight_copies(const RunRow& row);

schedule::PipelineShape pipeline_shape_of(const RunRow& row);

/// Costs of a schedule with split backward passes, of the rank with the largest. From 2 p
/// microbatches on they do not depend on their number.
struct SplitSchedule {
  double idle = 0;     ///< time, in forward passes of a rank's layers
  double saved = 0;    ///< most microbatches whose activations are saved
  double pending = 0;  ///< most microbatches whose weight gradients are to be computed
};
/// Simulates the schedule, unless it has before: weights' gradients and forward passes take as long
/// as inputs' gradients without recomputation, `recompute` of it more.
SplitSchedule split_schedule(schedule::PipelineKind kind, int ranks, double recompute);

/// Bytes of activations of a layer and microbatch that a rank saves for its backward pass, without
/// those that the row recomputes in part ("selective", "norm, act", "layernorm, moe").
double saved_bytes(const RunRow& row);
/// Activations of a layer and microbatch that the first stage saves at once, at its peak.
double saved_layers(const RunRow& row);

/// Peak of a rank's memory without its state: saved activations, and the larger of the loss (logits
/// in bf16 and f32) and the backward pass of an FFN (an f32 weight gradient and its operands). A
/// tied embedding between stages keeps more microbatches of the last one, with their logits.
double working_bytes(const RunRow& row);

/// Peak of allocated memory of a rank in GiB: state (bf16 weights, f32 gradients, Adam in f32
/// sharded over the replicas) and working_bytes.
double peak_memory_gib(const RunRow& row);

}  // namespace tandem::plan
