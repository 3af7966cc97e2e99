// The few numbers that all ranks share in a step.
#pragma once

#include "engine/parallel/data_parallel.h"
#include "engine/train/metrics.h"
#include "tandem/communicator.h"

namespace tandem {

struct StepSums {
  double loss = 0;       ///< summed over the ranks, in rank order
  double squares = 0;    ///< of the gradients; summed likewise
  double elapsed_s = 0;  ///< rank 0's
  bool stop = false;     ///< a rank was asked to end the run
  bool save = false;     ///< a rank was asked for a checkpoint
  bool failed = false;   ///< a rank could not read its part of the text, or write its metrics
};
/// Collective; the same bits on every rank.
StepSums exchange_sums(Communicator& world, const StepSums& mine);

/// Collective: fills the times from the recorder of the slowest rank, the one that computed
/// longest: the others waited for it. They are of one rank, so that they add up. Bytes are of all
/// ranks; `sent` is this one's.
void exchange_step(Communicator& world, const DataParallel::Sent& sent, StepMetrics& metrics);

}  // namespace tandem
