// Memory of a training run's activations, computed before allocation: what microbatches in flight
// save, and what they share (engine/model/recompute.h); and the scratch memory of their operators.
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

/// Bytes of a stage's context-parallel attention: messages to and from the other ranks, and the
/// scratch of blocks. 0 without context parallelism.
double context_attention_bytes(const ModelConfig& model, const ParallelConfig& parallel,
                               const RunConfig& train);

/// Bytes that passes of a rank work in: gradients of the residual stream, of a branch's values and
/// of rows of the embedding, on GPUs also that of q, which attention sums in f32; and buffers of
/// context-parallel attention. Without those that other overlap operators communicate through, and
/// those of experts.
double rank_scratch_bytes(const ModelConfig& model, const ParallelConfig& parallel,
                          const RunConfig& train, int pp_rank, bool on_gpus = false);

}  // namespace tandem
