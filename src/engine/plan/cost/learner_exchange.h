// Cost of learners' exchanges ([sync]) in a layout of one of them: memory of a rank, bytes that it
// sends, seconds on the link between learners, and those that a step waits for.
#pragma once

#include "engine/model/config.h"
#include "engine/parallel/sync/config.h"
#include "engine/plan/cost/gpu_spec.h"
#include "engine/plan/fit/run_rows.h"

namespace tandem::plan {

/// Costs of the rank with most weights.
struct LearnerExchange {
  double memory_bytes = 0;  ///< moments of the exchanges, changes and messages
  double sent_bytes = 0;    ///< for the largest fragment, to all other learners
  double seconds = 0;       ///< of these on the link
  double step_bytes = 0;    ///< sent a step, on average
};

class LearnerExchanges {
 public:
  LearnerExchanges(const ModelConfig& model, const SyncConfig& sync);

  /// Costs in a layout of one learner.
  LearnerExchange of(const RunRow& row, const GpuSpec& gpu) const;
  /// Seconds that a step of `step` seconds waits on average: for what of each exchange the steps of
  /// its delay do not hide.
  double exposed_seconds(const LearnerExchange& exchange, double step) const;

 private:
  SyncConfig sync_;
  double bytes_ = 0;                   // of the largest fragment's message, a parameter
  double changes_ = 0, messages_ = 0;  // of ExchangeBytes, a parameter
  double scratch_ = 0;                 // of ExchangeBytes, with all of the largest matrix
  double all_bytes_ = 0;               // of the messages of all fragments, a parameter
};

}  // namespace tandem::plan
