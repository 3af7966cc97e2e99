// Predicted and measured step time of a run's first steps.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/config/config.h"
#include "engine/parallel/dims.h"
#include "engine/plan/cost/step_split.h"
#include "engine/train/records/step_record.h"

namespace tandem {

class SelfCheck {
 public:
  /// Whether a run after step `begin` is checked: with trace.ranks on CPU ranks, if it is long
  /// enough and its batch does not grow.
  static bool applies(const TrainConfig& config, const ParallelGroups& groups, int64_t begin);

  /// Measures the costs that the prediction is made of (cost_probe.h). `groups` and `config` must
  /// outlive this object. Collective.
  SelfCheck(const TrainConfig& config, const ParallelGroups& groups);

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
