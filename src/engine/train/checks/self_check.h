// Predicted and measured step time of a run's first steps.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/parallel/dims.h"
#include "engine/plan/cost/step_split.h"
#include "engine/train/config.h"
#include "engine/train/records/step_record.h"

namespace tandem {

class SelfCheck {
 public:
  /// Whether a run after step `begin` is checked: with trace.ranks on CPU ranks, if it is long
  /// enough and its batch does not grow.
  static bool applies(const TraceConfig& trace, const RunConfig& train,
                      const ParallelGroups& groups, int64_t begin);

  /// `predicted`: of a step. `groups` must outlive this object.
  SelfCheck(const plan::StepTime& predicted, const ParallelGroups& groups);

  /// Whether the next step is the last one that is compared.
  bool compares_next() const;
  /// Adds a step of this rank. With the last one that is compared, on rank 0 returns the lines that
  /// compare them and writes them to `path`, unless that is empty, as JSON; empty for others and
  /// afterwards. Collective.
  std::vector<std::string> add(const StepRecord& step, const PhaseTimes& phases,
                               const std::string& path);

 private:
  const ParallelGroups& groups_;
  plan::StepSplit predicted_, sum_;
  int64_t steps_ = 0;
};

}  // namespace tandem
