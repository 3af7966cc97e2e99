// Lines of a trace in Chrome's JSON, shared by traces that are in memory and merged ones.
#pragma once

#include <chrono>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "observe/recorder.h"

namespace tandem {

/// Rows of one rank's events, which are given in order of their begins: the first free row of the
/// event's lane and processor, so that no two slices of a row overlap.
class LaneRows {
 public:
  int add(const SpanEvent& event);

 private:
  /// Times at which rows are free: leaves of a binary tree of minimums, whose root is element 1.
  struct Lane {
    std::vector<TimePoint> tree = std::vector<TimePoint>(2, TimePoint::min());
  };
  std::map<std::pair<int, int>, Lane> lanes_;  // by processor and lane
};

/// Track of an event in its row.
int track_of(const SpanEvent& event, int row);

/// Slice of an event, where `at` is its begin and `duration` its length.
struct TraceSlice {
  int rank = 0, track = 0;
  std::chrono::nanoseconds at{}, duration{};
};
std::string slice_line(const SpanEvent& event, const TraceSlice& slice);
/// Names of a rank, and of one of its tracks.
std::string rank_lines(int rank);
std::string track_lines(int rank, int track);

/// Times at which an arrow leaves and enters the slices that it connects. It is bound to a slice
/// only within it.
struct ArrowTimes {
  std::chrono::nanoseconds from{}, to{};
  std::chrono::nanoseconds backward{};  ///< by which it would end before its begin: clock errors
};
/// A message leaves at the end of its send, a collective at the begin of its last rank's span; they
/// enter just before the end of the other's.
ArrowTimes arrow_times(const TraceSlice& from, const TraceSlice& to, bool is_collective);

struct ArrowText {
  size_t id = 0;
  std::string_view name;  ///< of the operation
  bool is_collective = false;
  int microbatch = -1;
  TraceSlice from, to;
};
/// Lines of the arrow's start and end.
std::pair<std::string, std::string> arrow_lines(const ArrowText& arrow, const ArrowTimes& times);

std::string microseconds(std::chrono::nanoseconds time);

}  // namespace tandem
