// Random weights of a new model.
#pragma once

#include <cstdint>

#include "core/exec.h"
#include "engine/model/layout.h"
#include "engine/model/weight_writer.h"

namespace tandem {

/// Initializes weights, views [layout.size]: matrices normal(0, 0.02), those that write to the
/// residual stream scaled by 1 / sqrt(2 * layers), norms 1. Each element depends only on (seed,
/// tensor name, position in the full tensor); without weights in f32 it is rounded.
void initialize_parameters(const Exec& exec, const ModelLayout& layout, const ModelConfig& config,
                           uint64_t seed, const WeightViews& to);
/// One parameter, to views of its local_range.
void initialize_parameter(WeightWriter& writer, const Parameter& p, const ModelConfig& config,
                          uint64_t seed, const WeightViews& to);

}  // namespace tandem
