// Predicted and measured step time side by side, by what the time is for.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/plan/cost/step_cost.h"
#include "observe/phases.h"

namespace tandem::plan {

/// Milliseconds of a step, mean of the ranks.
struct StepSplit {
  double step = 0;
  double compute = 0;             ///< forward and backward passes
  double tp = 0, ep = 0, dp = 0;  ///< waits
  double cp = 0;                  ///< waits for other rows of the same sequences
  double pp = 0;                  ///< waits for other pipeline stages
  double step_waits = 0;          ///< waits for the slowest rank of a step
  double sync = 0;                ///< waits for other learners, which are not predicted
  double update = 0;              ///< sums of gradients and optimizer
  double data = 0, other = 0;     ///< text; checkpoints and what is not recorded
};

/// The terms of a split but `step`, with their names.
struct SplitTerm {
  std::string_view name;
  double StepSplit::*ms;
};
std::span<const SplitTerm> split_terms();

StepSplit split_of(const StepTime& time);
StepSplit split_of(double step_ms, const PhaseTimes& phases);

/// "self-check, steps 3 to 22: 41.2 ms a step, predicted 39.0 (5.6 % longer)", both by term, and
/// the term that differs most if the step is off by 2 % or more.
std::vector<std::string> describe_split(int64_t first, int64_t last, const StepSplit& measured,
                                        const StepSplit& predicted);

/// {"first", "last", "predicted_ms": {"step", "compute", …}, "measured_ms": {…}}
std::string split_json(int64_t first, int64_t last, const StepSplit& measured,
                       const StepSplit& predicted);

}  // namespace tandem::plan
