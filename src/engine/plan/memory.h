// Lower bound of a training run's memory, computed before allocation.
#pragma once

#include "engine/config/config.h"
#include "engine/eval/evaluate.h"

namespace tandem {

/// Bytes of weights, gradients and moments of all ranks together. In floating point, which does not
/// overflow.
double training_bytes(const TrainConfig& config);
/// Bytes of saved activations of all ranks together; assumes bf16 for train.dtype "auto".
double activation_bytes(const TrainConfig& config);
/// Throws ConfigError if the ranks on this machine need more than its memory. `on_gpus`:
/// activations are in the GPUs' memory, which is not checked.
void check_memory(const TrainConfig& config, bool on_gpus = false);
/// Throws InvalidArgument if a model and its windows need more than this machine's memory.
void check_memory(const ModelConfig& model, const EvaluateOptions& options);

}  // namespace tandem
