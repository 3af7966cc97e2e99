// A peak for all runs of a test program, so that each need not measure it.
#pragma once

#include <atomic>

#include "engine/train/trainer.h"

namespace tandem {

/// The request with the peak that the program's first run measures. Runs of more steps compare
/// themselves with a prediction if they measure it (SelfCheck).
inline TrainRequest with_known_peak(TrainRequest request) {
  static std::atomic<double> rank_flops;
  const RunConfig& train = request.config.train;
  const bool is_short = train.ends_by_steps() && train.steps < 22;
  if (!request.rank_flops && is_short) request.rank_flops = &rank_flops;
  return request;
}

}  // namespace tandem
