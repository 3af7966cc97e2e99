// Progress line of a run, and notes on what its steps send.
#pragma once

#include "engine/checkpoint/checkpoint.h"
#include "engine/parallel/config.h"
#include "engine/report/progress.h"
#include "engine/train/config.h"
#include "engine/train/records/step_record.h"

namespace tandem {

class ProgressSink : public StepSink {
 public:
  /// All must outlive this object. `state`: of the run, with the step that is added.
  ProgressSink(const RunConfig& train, const ParallelConfig& parallel, ProgressLine& progress,
               const TrainState& state)
      : train_(train), parallel_(parallel), progress_(progress), state_(state) {}

  void add(const StepRecord& step) override;

 private:
  int64_t estimate_steps(const StepRecord& step) const;

  const RunConfig& train_;
  const ParallelConfig& parallel_;
  ProgressLine& progress_;
  const TrainState& state_;
  int64_t num_steps_ = 0;
};

}  // namespace tandem
