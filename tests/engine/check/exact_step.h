// First step of the integer-valued model (integer_weights.h), computed in doubles by other code
// than the engine's.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "engine/config/config.h"
#include "engine/data/corpus.h"

namespace tandem {

struct ExactStep {
  std::map<std::string, std::vector<double>> gradients;
  double loss = 0;
  /// Significant bits that the largest sum of magnitudes needs: up to 24 f32 has no rounding, in
  /// whatever order and parts the sum is computed.
  double bits = 0;
  std::string widest;  ///< that sum
};
ExactStep compute_exact_step(const TrainConfig& config, const Corpus& corpus);

}  // namespace tandem
