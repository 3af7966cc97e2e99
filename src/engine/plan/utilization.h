// Model FLOPs utilization (MFU): the FLOPs that a model needs, over what this machine can do.
//
// MFU = tokens/s x FLOPs per token / peak. The peak is measured, not looked up: the rate of square
// matrix products in the run's dtype on all ranks at once, by the same library, as the run begins.
// So it says how much of what products reach here a step reaches, and not how good those are.
#pragma once

#include <string>

#include "engine/config/config.h"
#include "tandem/communicator.h"

namespace tandem {

struct Utilization {
  double flops_per_token = 0;  ///< forward and backward
  double peak_flops = 0;       ///< a second, of all ranks
  double others = 0;           ///< share of the processors that other programs had meanwhile
  double of(double tokens_per_s) const { return tokens_per_s * flops_per_token / peak_flops; }
  /// The formula with its numbers, in three lines, and a warning where the machine was busy.
  std::string describe(const TrainConfig& config) const;
};

/// Collective. `config` names the dtype. Repeated while other programs keep the machine busy, a few
/// times at most; the best counts.
Utilization measure_utilization(Communicator& world, const TrainConfig& config);

}  // namespace tandem
