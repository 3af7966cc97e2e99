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
  /// After the sum over ranks that run `replicas`: whether all ranks of each have read the same.
  bool agrees(int64_t replicas) const { return hash_all == hash * uint64_t(ranks / replicas); }
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
  // Number of learners that have updated their weights, their targets, and why others have not: if
  // learners judge their steps for themselves (engine/train/step_reports.h).
  int64_t updates = 0, targets = 0;
  bool is_nonfinite = false, is_spike = false, ends_updates = false;

  /// Adds other ranks', of a later place along an axis.
  StepSums& operator+=(const StepSums& other);
};

/// Times and bytes of a step. Sums of several ranks have the times of the rank with the longest
/// compute time, for which the others waited; these are of one rank, so they add up, except for
/// those by axis.
struct StepTimes {
  struct {
    double gemm = 0, compute = 0, wait = 0, recompute = 0;
  } slowest;             ///< of the rank that computes longest
  double data_wait = 0;  ///< the longest
  ShardedOptimizer::Sent sent;
  double busy_s = 0, passes_s = 0;  ///< of a pipeline: the ranks' sum, the longest
  double checkpoint_ms = 0;
  int64_t memory_bytes = 0;
  uint64_t stage_bytes = 0, tp_bytes = 0, expert_bytes = 0, cp_bytes = 0, sync_bytes = 0;
  AxisMeans waits;  ///< the ranks' sums
  double state_bytes = 0;

  bool has_passes = false;  ///< of a pipeline

  /// This rank's. `record`: with its memory, state, time of checkpoints and bytes of layers and of
  /// learners; `passes` of a pipeline.
  static StepTimes of_rank(const ShardedOptimizer::Sent& sent,
                           const std::optional<Pipeline::Times>& passes, const StepRecord& record);
  StepTimes& operator+=(const StepTimes& other);
  /// Sets a record's times and bytes to these, of `ranks`.
  void write(int ranks, StepRecord& record) const;
};
/// Communicators whose ranks together are the world: sums are made along each in turn.
using WorldAxes = std::vector<Communicator*>;

/// Collective; bitwise equal on every rank, learner_squares on every rank of a learner.
StepSums exchange_sums(const ParallelGroups& groups, const StepSums& local);
/// Sums over the ranks of a learner, which wait for no other one.
StepSums exchange_learner_sums(const ParallelGroups& groups, const StepSums& local);

/// Times of all ranks along the axes. Collective; bitwise equal on every rank.
StepTimes exchange_times(const WorldAxes& axes, const StepTimes& local);
/// Fills the times and bytes of a record, which has this rank's as of StepTimes::of_rank, with
/// those of all ranks. Collective.
void exchange_step(const WorldAxes& axes, const ShardedOptimizer::Sent& sent,
                   const std::optional<Pipeline::Times>& passes, StepRecord& record);

}  // namespace tandem
