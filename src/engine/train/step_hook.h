// Hooks of a training step: what a run does around its passes and updates, a file each in hooks/.
// make_hooks() lists them; each moment calls them in the order of that list, on every rank.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "engine/data/stream/stream_cursor.h"
#include "engine/train/checks/step_guard.h"
#include "engine/train/records/step_record.h"
#include "engine/train/step_exchange.h"
#include "engine/train/step_executor.h"

namespace tandem {

/// A step, filled in as it is made.
struct Step {
  int64_t number = 0;  ///< from 1
  int64_t first_sample = 0;
  std::vector<StreamCursor> cursors = {};  ///< StepExecutor::cursors
  int64_t targets = 0;
  /// The passes, which hooks may run again.
  std::function<StepExecutor::Result()> compute = {};
  StepExecutor::Result result = {};  ///< of the passes
  StepSums sums = {};                ///< this rank's, then those of all ranks
  StepVerdict verdict = {};
  std::string no_update = {};  ///< why learners that report made none in a step that counts
  StepRecord record = {};
  // Learners that send each other reports (engine/train/step_reports.h) have the sums and the
  // record of all ranks later than `after_step`.
  bool is_summed = true;    ///< `sums` are those of all ranks
  bool is_complete = true;  ///< `record` is that of all ranks
  bool is_agreed = true;    ///< all ranks have the same sums of the same steps, whichever they are
};

/// Methods are collective unless they say otherwise.
class StepHook {
 public:
  virtual ~StepHook() = default;

  /// Before the step's time begins; the steps before are complete.
  virtual void before_step(Step&) {}
  virtual void before_passes(Step&) {}
  /// Adds to this rank's sums.
  virtual void after_passes(Step&) {}
  /// May end the run and drop the step (RunEnding::drops_step). Of learners that report, in a later
  /// step: then it cannot drop it.
  virtual void after_sums(Step&) {}
  /// The step's samples are consumed, also if the verdict is to skip it. Follows `after_sums`.
  virtual void after_verdict(Step&) {}
  /// Before weights or optimizer state may change, in a step that counts.
  virtual void before_update(Step&) {}
  /// Within the step's time, of a step that counts.
  virtual void after_update(Step&) {}
  /// Whether all ranks wait for one another in `after_step`, or in `before_step` of the next step,
  /// so that learners that report must be at the same step. The same on every rank. Not collective.
  virtual bool waits_for_all(const Step&) const { return false; }
  /// After the step's time.
  virtual void after_step(Step&) {}
  /// Called in order for steps whose record was not complete there, once it is.
  virtual void after_late_record(Step&) {}
  /// Instead of `after_step`, for a step that was dropped at any moment.
  virtual void after_dropped_step(Step&) {}
  /// Before the last step is saved. May throw instead, on every rank.
  virtual void before_end() {}
  /// After the last step is saved, or could not be.
  virtual void at_end() {}
};

}  // namespace tandem
