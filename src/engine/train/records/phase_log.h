// This rank's phases of every step, for `tandem doctor` and the report (observe/rank_records.h).
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "engine/parallel/dims.h"
#include "engine/train/config.h"
#include "engine/train/records/step_record.h"
#include "observe/rank_records.h"

namespace tandem {

class PhaseLog {
 public:
  /// Records steps after `begin` in `folder` if trace.ranks is set. A file that cannot be written
  /// is reported once, and ends the records, not the run.
  PhaseLog(const TraceConfig& trace, const std::string& folder, const ParallelGroups& groups,
           int64_t begin);

  /// Fills tp_bytes, expert_bytes and cp_bytes with this rank's since the last call.
  void count_layer_bytes(StepRecord& step);
  /// At the end of a step's timed work: what follows, other than checkpoints, is not part of it.
  void end_step();
  /// After the step's checkpoint.
  void add(const StepRecord& step);
  /// Phases of the last step.
  const PhaseTimes& phases() const { return phases_; }

 private:
  const ParallelGroups& groups_;
  uint64_t tp_bytes_ = 0, expert_bytes_ = 0, cp_bytes_ = 0;  // until the last step's end
  std::optional<RankRecords> records_;
  PhaseTimes phases_{};
};

}  // namespace tandem
