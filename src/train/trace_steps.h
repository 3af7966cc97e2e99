// Records a few steps of every rank and writes them as OUT/trace.json.
#pragma once

#include <string>

#include "observe/recorder.h"
#include "tandem/communicator.h"
#include "train/config.h"

namespace tandem {

/// The steps start some way in, when caches and tuner have settled. All calls are collective.
class TraceSteps {
 public:
  TraceSteps(Communicator& world, const TrainConfig& config, int64_t first_step);
  void before_step(int64_t step);
  void after_step(int64_t step, const std::string& out);
  /// Writes what there is, if the run ended before the last traced step.
  void finish(const std::string& out);

 private:
  Communicator& world_;
  int64_t begin_, end_;
  bool recording_ = false;
  TimePoint origin_;
};

}  // namespace tandem
