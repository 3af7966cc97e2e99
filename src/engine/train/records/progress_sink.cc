#include "engine/train/records/progress_sink.h"

#include <algorithm>
#include <cmath>

#include "engine/model/codec_policy.h"
#include "engine/train/records/metrics_log.h"

namespace tandem {

void ProgressSink::add(const StepRecord& step) {
  if (++num_steps_ == 2) {  // the first step sends no weights
    for (const std::string& line :
         describe_sent(CodecPolicy::parse(parallel_.codec), parallel_.error_feedback, step)) {
      progress_.note(line);
    }
  }
  progress_.update({.step = step.step,
                    .steps = estimate_steps(step),
                    .loss = step.loss,
                    .tokens_per_s = step.tokens_per_s,
                    .elapsed_s = state_.elapsed_s,
                    .seconds = train_.seconds,
                    .lr = step.lr,
                    .grad_norm = step.grad_norm,
                    .mfu = step.mfu});
}

/// Steps of the run; 0 if it ends by time.
int64_t ProgressSink::estimate_steps(const StepRecord& step) const {
  if (train_.seconds > 0) return 0;
  if (train_.tokens == 0) return train_.steps;
  const auto left = double(train_.tokens - state_.control.tokens);
  return step.step + std::max<int64_t>(0, std::llround(left / double(step.tokens)));
}

}  // namespace tandem
