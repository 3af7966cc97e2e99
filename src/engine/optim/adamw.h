// Steps of AdamW and LAMB; kernels/optimizer.h has their updates.
#pragma once

#include <cstdint>

#include "engine/optim/config.h"
#include "kernels/optimizer.h"

namespace tandem {

/// Constants of one step by a job's settings.
struct AdamStep : AdamConstants {
  /// `step` counts from 0.
  static AdamStep make(const OptimizerConfig& config, int64_t step, double lr,
                       double gradient_norm);
};

}  // namespace tandem
