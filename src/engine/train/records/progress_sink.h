// Progress line of a run, and notes on what its steps send.
#pragma once

#include "engine/checkpoint/checkpoint.h"
#include "engine/config/config.h"
#include "engine/report/progress.h"
#include "engine/train/records/step_record.h"

namespace tandem {

class ProgressSink : public StepSink {
 public:
  /// All must outlive this object. `state`: of the run, with the step that is added.
  ProgressSink(const TrainConfig& config, ProgressLine& progress, const TrainState& state)
      : config_(config), progress_(progress), state_(state) {}

  void add(const StepRecord& step) override;

 private:
  int64_t estimate_steps(const StepRecord& step) const;

  const TrainConfig& config_;
  ProgressLine& progress_;
  const TrainState& state_;
  int64_t num_steps_ = 0;
};

}  // namespace tandem
