// Learning rate schedules.
#pragma once

#include <cstdint>

#include "engine/optim/config.h"
#include "engine/train/config.h"

namespace tandem {

/// Linear warm-up to the peak, then `optimizer.schedule`. With x the part of the run after the
/// warm-up that is done, in [0, 1]: of its steps or, if `train.seconds` or `train.tokens` ends the
/// run, of its time or tokens:
///   constant      the peak
///   linear        to min_lr at x = 1
///   cosine        to min_lr at x = 1, as half a period (arXiv 1608.03983)
///   wsd           the peak, then to min_lr over the last `optimizer.decay_fraction` of x
///                 (warmup-stable-decay, arXiv 2404.06395). With d the part of the decay that is
///                 done, `optimizer.decay_type` is linear, 1 - d; cosine, (1 + cos(pi d)) / 2; or
///                 1-sqrt, 1 - sqrt(d) (arXiv 2405.18392)
///   inverse-sqrt  peak * sqrt(warmup / step), at least min_lr; independent of the run's length
///                 (arXiv 1706.03762)
/// `step` counts from 0. `done`: seconds or tokens before it, if these end the run; `warmup`: the
/// same before the first step after the warm-up.
double learning_rate(const OptimizerConfig& optimizer, const RunConfig& train, int64_t step,
                     double done, double warmup);

}  // namespace tandem
