// Records some steps of every rank and writes those that are typical as OUT/trace.json.
#pragma once

#include <string>
#include <vector>

#include "engine/config/config.h"
#include "observe/recorder.h"
#include "tandem/communicator.h"

namespace tandem {

/// Recording starts some way in, when caches and tuner have settled. Of several runs of trace.steps
/// steps the one is kept whose time is nearest to the median: a single step may well show the
/// opposite of what the others do. All calls are collective.
class TraceSteps {
 public:
  TraceSteps(Communicator& world, const TrainConfig& config, int64_t first_step);
  void before_step(int64_t step);
  void after_step(int64_t step, const std::string& out);
  /// Writes what there is, if the run ended before the last traced step.
  void finish(const std::string& out);

 private:
  struct Candidate {
    double seconds = 0;
    std::vector<SpanEvent> events;
  };
  void end_candidate();
  size_t typical() const;

  Communicator& world_;
  int64_t each_, begin_, end_;  // steps of a candidate; the first and past the last of all
  bool recording_ = false, in_candidate_ = false;
  TimePoint origin_, start_;
  std::vector<Candidate> candidates_;
};

/// Index of the value nearest to the median, the first of equals.
size_t nearest_to_median(const std::vector<double>& values);

}  // namespace tandem
