// Model FLOPs utilization (MFU): FLOPs that the model needs over this machine's peak.
//
// MFU = tokens/s x FLOPs per token / peak. On GPUs whose data sheet is known, and in bf16, the peak
// is the rated one, as published figures take it. All others are measured: the rate of square GEMMs
// in the run's dtype on all ranks concurrently, with the same library, at the start of the run; MFU
// is then relative to the GEMM rate reached here. A run that exceeds a measured peak shows that it
// was too low, as on a busy machine: its MFU is not known from then on.
#pragma once

#include <atomic>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/config/config.h"
#include "tandem/communicator.h"

namespace tandem {

struct Utilization {
  double flops_per_token = 0;  ///< forward and backward
  double peak_flops = 0;       ///< per second, of all ranks; 0: not known
  double external_share = 0;   ///< share of the processors used by other programs during the
                               ///< measurement
  int64_t side = 0;            ///< of the square matrices multiplied; 0: the peak is rated
  int gpus = 0;                ///< number and name of the GPUs, if the peak is rated
  std::string gpu = {};
  /// MFU at that rate; 0 if the peak is not known.
  double of(double tokens_per_s) const {
    return peak_flops > 0 ? tokens_per_s * flops_per_token / peak_flops : 0;
  }
  /// Forgets a measured peak that a run exceeds at that rate. Returns a line that says so.
  std::optional<std::string> check_peak(double tokens_per_s);
  /// The formula with its numbers, in three lines, and a warning if the machine was busy.
  std::vector<std::string> describe(const TrainConfig& config) const;
};

/// Dense bf16 FLOP/s of a GPU by its data sheet; 0 if it is not known here.
double rated_bf16_flops(std::string_view gpu);

/// Finds or measures the peak in the dtype of `config`. Repeated while other programs keep the
/// machine busy, at most a few times, for runs of at least 100 steps; the best counts. Collective.
/// `rank_flops`: measured peak of a rank, used if it is not 0 and else set; the same on every rank.
Utilization measure_utilization(Communicator& world, const TrainConfig& config,
                                std::atomic<double>* rank_flops = nullptr);

}  // namespace tandem
