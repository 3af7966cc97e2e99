// Scalars exchanged by all ranks in a step.
#pragma once

#include "engine/parallel/data_parallel.h"
#include "engine/train/metrics.h"
#include "tandem/communicator.h"

namespace tandem {

struct StepSums {
  double loss = 0;       ///< summed over the ranks, in rank order
  double squares = 0;    ///< sum of squared gradients, likewise
  double elapsed_s = 0;  ///< rank 0's
  bool stop = false;     ///< a rank was asked to end the run
  bool save = false;     ///< a rank was asked for a checkpoint
  bool failed = false;   ///< a rank failed to read its text or to write its metrics
};
/// Collective; bitwise equal on every rank.
StepSums exchange_sums(Communicator& world, const StepSums& local);

/// Fills the times from the recorder of the rank with the longest compute time, for which the
/// others waited; all times are of one rank, so they add up. Bytes are summed over the ranks;
/// `sent` is this rank's. Collective.
void exchange_step(Communicator& world, const DataParallel::Sent& sent, StepMetrics& metrics);

}  // namespace tandem
