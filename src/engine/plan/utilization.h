// Model FLOPs utilization (MFU): FLOPs that the model needs over this machine's peak.
//
// MFU = tokens/s x FLOPs per token / peak. The peak is measured, not looked up: the rate of square
// GEMMs in the run's dtype on all ranks concurrently, with the same library, at the start of the
// run. So MFU is relative to the GEMM rate reached here; it does not rate the GEMMs themselves.
#pragma once

#include <string>
#include <vector>

#include "engine/config/config.h"
#include "tandem/communicator.h"

namespace tandem {

struct Utilization {
  double flops_per_token = 0;  ///< forward and backward
  double peak_flops = 0;       ///< per second, of all ranks
  double others = 0;           ///< share of the processors used by other programs during the
                               ///< measurement
  int64_t side = 0;            ///< of the square matrices multiplied
  double of(double tokens_per_s) const { return tokens_per_s * flops_per_token / peak_flops; }
  /// The formula with its numbers, in three lines, and a warning if the machine was busy.
  std::vector<std::string> describe(const TrainConfig& config) const;
};

/// Measures the peak in the dtype of `config`. Repeated while other programs keep the machine busy,
/// at most a few times, for runs of at least 100 steps; the best counts. Collective.
Utilization measure_utilization(Communicator& world, const TrainConfig& config);

}  // namespace tandem
