// Scalars exchanged by all ranks in a step.
#pragma once

#include <optional>
#include <vector>

#include "engine/checkpoint/run/run_checkpoints.h"
#include "engine/parallel/dims.h"
#include "engine/parallel/pipeline.h"
#include "engine/parallel/sharded/sharded_optimizer.h"
#include "engine/train/checks/finding.h"
#include "engine/train/records/step_record.h"
#include "tandem/communicator.h"

namespace tandem {

/// Text that ranks have read in a step. A replica's ranks with the model's first or last stage read
/// the same.
struct TextRead {
  uint64_t hash = 0;      ///< sum of sample_hash, one rank a replica
  uint64_t hash_all = 0;  ///< sum of sample_hash of all ranks that read
  int64_t ranks = 0;      ///< number of these
  TextRead& operator+=(const TextRead& other) {
    hash += other.hash, hash_all += other.hash_all, ranks += other.ranks;
    return *this;
  }
  /// After the sum over the world: whether all ranks of each of `dp` replicas, of all learners,
  /// have read the same.
  bool agrees(int dp) const { return hash_all == hash * uint64_t(ranks / dp); }
};

struct StepSums {
  double loss = 0;             ///< summed over the ranks, in their order along each axis
  double squares = 0;          ///< sum of squared gradients, likewise
  double learner_squares = 0;  ///< after the sum: that of this rank's learner
  TextRead text;
  double elapsed_s = 0;             ///< rank 0's
  bool stop = false;                ///< a rank was asked to end the run
  bool save = false;                ///< a rank was asked for a checkpoint
  RunCheckpoints::Running running;  ///< of any rank
  bool failed = false;              ///< a rank failed to read its text or to write its metrics
  CheckSums checks;
};
/// Communicators whose ranks together are the world: sums are made along each in turn.
using WorldAxes = std::vector<Communicator*>;

/// Collective; bitwise equal on every rank, learner_squares on every rank of a learner.
StepSums exchange_sums(const ParallelGroups& groups, const StepSums& local);

/// Fills the times from the recorder of the rank with the longest compute time, for which the
/// others waited; all times are of one rank, so they add up, except for those by axis. Bytes are
/// summed over the ranks; `sent`, `passes`, record.memory_bytes, record.state_bytes_per_parameter,
/// record.checkpoint_ms and its bytes of layers and of learners are this rank's; `passes` of a
/// pipeline. Collective.
void exchange_step(const WorldAxes& axes, const ShardedOptimizer::Sent& sent,
                   const std::optional<Pipeline::Times>& passes, StepRecord& record);

}  // namespace tandem
