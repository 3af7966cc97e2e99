// Model whose training step has no rounding in f32, so that every layout must have the same bits.
//
// Weights are small integers times powers of two, and values are so close to zero that every
// function of the model is linear: RMSNorm with eps 1 divides by 1, SiLU halves, softmax is even.
// Attention reads two keys, a vocabulary of 512 makes its probabilities 2^-9, and the router's
// logits are equal or at least 128 apart. All sums are then of multiples of a power of two, exact
// in any order while their magnitudes are below 2^24 of them.
#pragma once

#include <cstdint>
#include <string>

#include "engine/config/config.h"
#include "engine/model/stage.h"

namespace tandem {

/// The job with the integer-valued model's shape.
TrainConfig integer_config(TrainConfig config);

/// Weight of the integer-valued model: `element` of the whole tensor.
double integer_weight(const ModelConfig& config, const std::string& tensor, int64_t element);

/// Writes the weights of a stage.
void initialize_integers(const ModelConfig& config, const Stage& stage);

}  // namespace tandem
