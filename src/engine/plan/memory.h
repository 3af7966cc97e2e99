// What a training run needs at least, before any of it is allocated.
#pragma once

#include "engine/config/config.h"
#include "engine/eval/evaluate.h"

namespace tandem {

/// Bytes of weights, gradients and moments of all ranks together. In floating point, which does not
/// overflow.
double training_bytes(const TrainConfig& config);
/// The same of what a forward pass leaves for the backward one; with train.dtype "auto" as if that
/// were bf16.
double activation_bytes(const TrainConfig& config);
/// Throws ConfigError when those of this machine's ranks are more than its memory.
void check_memory(const TrainConfig& config);
/// Throws InvalidArgument when a model and its windows are more than that.
void check_memory(const ModelConfig& model, const EvaluateOptions& options);

}  // namespace tandem
