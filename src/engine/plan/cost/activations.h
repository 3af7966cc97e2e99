// Memory of a training run's activations, computed before allocation: what microbatches in flight
// save, and what they share (engine/model/recompute.h). Without the scratch memory of operators.
#pragma once

#include "engine/config/config.h"
#include "schedule/pipeline.h"

namespace tandem {

/// Highest number of microbatches of a stage whose activations are saved. `is_tied`: the first
/// stage looks up the embedding of the last one's head, which saves a microbatch until the
/// gradients of its lookups have been added.
int saved_microbatches(const schedule::PipelineShape& shape, int stage, bool is_tied);

/// Bytes of a rank of a pipeline stage. In floating point, which does not overflow. Assumes bf16
/// for train.dtype "auto", and tokens spread evenly over the experts; `on_gpus`: as many as could
/// arrive, for which GPUs have memory.
double rank_activation_bytes(const TrainConfig& config, int pp_rank, bool on_gpus = false);

}  // namespace tandem
