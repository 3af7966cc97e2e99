// Batch ramp-up: the batch grows in equal increments from train.batch_start to train.batch over the
// first train.batch_rampup_samples samples (Megatron-LM's --rampup-batch-size). It is a function of
// the samples consumed so far, so it resumes with them.
#pragma once

#include <cstdint>

#include "engine/config/config.h"

namespace tandem {

/// Sequences of the step whose first sample is `sample`.
int64_t batch_at(const TrainConfig& config, int64_t sample);

/// Throws ConfigError unless the ramp-up's keys are consistent and replicas can share each of its
/// batches. Microbatches keep their size, so it needs train.microbatch.
void check_batch_rampup(const TrainConfig& config);

}  // namespace tandem
