// Records some steps on every rank and writes typical ones as OUT/trace.json.
#pragma once

#include <string>
#include <vector>

#include "engine/config/config.h"
#include "observe/clock_offset.h"
#include "observe/recorder.h"
#include "tandem/communicator.h"

namespace tandem {

/// Recording starts after a few steps, once caches and the tuner have settled. Of several
/// candidates of trace.steps steps each, the one with the time nearest to the median is saved: a
/// single step may be an outlier. All calls are collective.
class TraceSteps {
 public:
  TraceSteps(Communicator& world, const TrainConfig& config, int64_t first_step);
  void before_step(int64_t step);
  /// Instead of after_step, for a step that is dropped and made again: events up to here are
  /// dropped, too.
  void drop_step();
  void after_step(int64_t step, const std::string& out);
  /// Writes the recorded steps if the run ended before the last traced step.
  void finish(const std::string& out);

 private:
  struct Candidate {
    double seconds = 0;
    std::vector<SpanEvent> events;
  };
  void end_candidate();
  size_t typical() const;

  Communicator& world_;
  int64_t each_, begin_, end_;  // steps of a candidate; first step and end of all candidates
  bool recording_ = false, in_candidate_ = false;
  TimePoint start_;
  std::vector<ClockOffset> clocks_;  // of all ranks, when recording began
  std::vector<Candidate> candidates_;
};

/// Index of the value nearest to the median, the first if tied.
size_t nearest_to_median(const std::vector<double>& values);

}  // namespace tandem
