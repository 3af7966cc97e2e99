// Events of all steps of a rank, in files of OUT/trace, written and read with bounded memory: those
// of two steps, each of at most kMaxEvents events.
//
// A rank writes segments RANK.NUMBER.spans of a quarter of its limit and keeps the newest four. A
// segment has records: clocks, which every rank measures at the same steps, and the events of steps
// between them. It begins with the last clock, so that each can be read without those before it.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/system/file_descriptor.h"
#include "observe/clock_offset.h"
#include "observe/recorder.h"

namespace tandem {

enum class SpanRecordKind : uint32_t {
  events,
  clock,
  repeated_clock  ///< the last one of the segment before
};

/// Header of a record.
struct SpanRecord {
  char magic[8];
  SpanRecordKind kind;
  int32_t rank, ranks;
  uint32_t unused;
  int64_t step;      ///< that the events belong to, from 1; of a clock 0
  int64_t begin_ns;  ///< the first begin of the events, on the rank's clock
  int64_t dropped;   ///< events of the step that were not stored
  int64_t bytes;     ///< that follow: of ClockOffset or of `pack`ed events
};

class SpanWriter {
 public:
  /// Removes the rank's segments of an earlier start, and on rank 0 also those of ranks that this
  /// run does not have. Throws IoError, also if the folder is a link.
  SpanWriter(const std::string& folder, int rank, int ranks, int64_t max_bytes);

  /// Throw IoError; the file then ends with a whole record, or one that readers ignore.
  void add_clock(const ClockOffset& clock);
  void add_events(int64_t step, std::vector<SpanEvent> events, int64_t dropped);

 private:
  void write_clock(SpanRecordKind kind);
  void write(SpanRecord record, std::span<const std::byte> bytes);
  void begin_segment();

  std::string folder_;
  int rank_, ranks_;
  int64_t max_segment_bytes_;
  int64_t number_ = 0, bytes_ = 0;
  std::string path_;
  std::optional<FileDescriptor> file_;
  std::optional<ClockOffset> clock_;
};

/// Segments of the ranks of a run, by rank. Throws IoError if the folder has none, or not those of
/// all ranks.
std::vector<std::vector<std::string>> span_segments(const std::string& folder);

/// Steps to read.
struct StepRange {
  int64_t first = 0, last = INT64_MAX;
  bool contains(int64_t step) const { return first <= step && step <= last; }
};

/// Steps of every rank's newest segment. Throws IoError as span_segments.
StepRange newest_steps(const std::string& folder);

/// Reads a rank's segments, which may grow, in order of the events' begins.
class SpanReader {
 public:
  SpanReader(int rank, std::vector<std::string> segments, const StepRange& range);

  int rank() const { return rank_; }
  /// Next event, on the clock of rank 0. An incomplete last record is ignored. Throws IoError for a
  /// damaged file, with its name.
  std::optional<SpanEvent> next();
  /// Step of the events read last, and begin of those of the step before them, on the clock of rank
  /// 0.
  int64_t step() const { return step_; }
  int64_t before_ns() const { return before_ns_; }
  /// Max error of the times of all events read so far, and number of those not stored.
  int64_t clock_bound_ns() const { return bound_ns_; }
  int64_t dropped() const { return dropped_; }

 private:
  /// Position in the segments.
  struct Cursor {
    size_t segment = 0;
    uint64_t offset = 0;
    std::optional<FileDescriptor> file;
  };
  /// Header at the cursor, which moves over ends of segments; nullopt at the end of all.
  std::optional<SpanRecord> peek(Cursor& at) const;
  static void skip(Cursor& at, const SpanRecord& record);
  std::string read_bytes(const Cursor& at, const SpanRecord& record) const;
  std::optional<ClockOffset> read_clock(const Cursor& at, const SpanRecord& record) const;
  /// Moves to the next step's events in the range; false at the end.
  bool find_events();
  void load_events();
  void find_later_clock();

  int rank_;
  std::vector<std::string> segments_;
  StepRange range_;
  Cursor at_, ahead_;
  std::optional<SpanRecord> found_;  // events at at_, not loaded yet
  std::optional<ClockOffset> clock_, later_clock_;
  uint64_t clocks_read_ = 0, clocks_ahead_ = 0;
  struct Pending {
    int64_t begin_ns;  // on the rank's clock
    SpanEvent event;
  };
  std::deque<Pending> pending_;  // by begin
  int64_t step_ = 0, begin_ns_ = INT64_MIN, before_ns_ = INT64_MIN, bound_ns_ = 0, dropped_ = 0;
};

}  // namespace tandem
