// Records some steps on every rank and writes typical ones as OUT/trace.json, or all steps to
// OUT/trace (observe/span_stream.h).
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "engine/train/config.h"
#include "observe/clock_offset.h"
#include "observe/recorder.h"
#include "observe/span_stream.h"
#include "tandem/communicator.h"

namespace tandem {

/// Recording of trace.json starts after a few steps, once caches and the tuner have settled. Of
/// several candidates of trace.steps steps each, the one with the time nearest to the median is
/// saved: a single step may be an outlier. Candidates have at most kMaxTraceEvents events in all
/// (27 MiB a rank); one that would exceed them is cut, and saved only if all are. All calls are
/// collective.
class TraceSteps {
 public:
  static constexpr size_t kMaxTraceEvents = 4 * kMaxEvents;

  TraceSteps(Communicator& world, const TraceConfig& trace, const RunConfig& train,
             int64_t first_step, const std::string& out);
  void before_step(int64_t step);
  /// Whether ranks wait for one another in `after_step`, or in the next `before_step`: they measure
  /// their clocks. `dropped`: the step after `step` was.
  bool measures_clocks_after(int64_t step, bool dropped) const;
  /// Instead of after_step, for a step that is dropped and made again: trace.json has no events up
  /// to here.
  void drop_step();
  void after_step(int64_t step);
  /// Writes the recorded steps if the run ended before the last traced step, and ends the stream.
  void finish();

 private:
  struct Candidate {
    double seconds = 0;
    size_t first_clock = 0;  ///< index of the clocks at its begin; those at its end follow
    bool is_cut = false;
    std::vector<SpanEvent> events;
  };
  void begin_candidate();
  void end_candidate();
  size_t typical() const;
  void write_typical();
  void take_events();
  void measure_stream_clock();
  /// Calls `write` of the stream; an error is reported once and ends the stream, not the run.
  template <typename Write>
  void to_stream(const Write& write);

  Communicator& world_;
  const std::string out_;
  int64_t each_, begin_, end_;  // steps of a candidate; first step and end of all candidates
  bool recording_ = false, in_candidate_ = false, streams_ = false;
  int64_t max_stream_bytes_, first_step_, step_ = 0;
  TimePoint start_;
  std::vector<std::vector<ClockOffset>> clocks_;  // of all ranks
  Candidate candidate_;
  size_t num_events_ = 0;  // of all candidates
  std::vector<Candidate> candidates_;
  std::optional<SpanWriter> stream_;
};

/// Index of the value nearest to the median, the first if tied.
size_t nearest_to_median(const std::vector<double>& values);

}  // namespace tandem
