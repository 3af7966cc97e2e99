// Choice of the state from which a run resumes: snapshots in the ranks' memory, or a checkpoint.
#pragma once

#include <optional>
#include <string>

#include "engine/checkpoint/snapshot/snapshot_memory.h"
#include "engine/train/records/run_files.h"
#include "tandem/communicator.h"

namespace tandem {

/// At most one of both; none: step 0.
struct ResumePoint {
  std::optional<SnapshotMemory::Found> memory;  ///< not verified yet
  std::string checkpoint;                       ///< folder of a verified one

  /// State of training there. Throws IoError; only if there is one.
  TrainState state() const;
  bool is_start() const { return !memory && checkpoint.empty(); }
};

/// Newest state of all ranks' snapshots and the checkpoints on disk; of the same step, the
/// snapshots. Throws ConfigError if it is of another model or text than the run of `files`, IoError
/// if there are only damaged checkpoints. `files`: rank 0's; others pass nullptr. `parameters`: of
/// the model, which bound the time that others wait.
/// Collective.
ResumePoint find_resume_point(Communicator& world, SnapshotMemory& memory, RunFiles* files,
                              int64_t parameters);

/// Restores weights and optimizer states from `from`, or, where snapshots are damaged, from the
/// next newest state. Returns the state of training; nullopt if nothing is left to resume from, and
/// the run begins at step 0. Collective.
std::optional<TrainState> restore(const TrainedRanks& ranks, SnapshotMemory& memory,
                                  ResumePoint from, RunFiles* files, int64_t parameters);

}  // namespace tandem
