#include "observe/trace_merge.h"

#include <fcntl.h>
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <queue>
#include <set>
#include <vector>

#include "core/system/file_descriptor.h"
#include "core/system/printable.h"
#include "observe/flow_matcher.h"
#include "tandem/error.h"

namespace tandem {
namespace {

using Nanoseconds = std::chrono::nanoseconds;

/// A rank's next event.
struct RankCursor {
  SpanReader reader;
  LaneRows rows;
  std::optional<SpanEvent> event;
  int64_t begin_ns() const { return Nanoseconds(event->begin.time_since_epoch()).count(); }
};

/// Writes to a file in chunks; the first one makes it.
class ChunkedFile {
 public:
  explicit ChunkedFile(const std::string& path) : path_(path) {}
  void add(std::string_view text) {
    text_ += text;
    if (text_.size() > kChunkOfFile) flush();
  }
  void flush() {
    if (!file_) file_.emplace(path_, O_WRONLY | O_CREAT | O_TRUNC);
    append_to(file_->get(), path_, text_);
  }

 private:
  static constexpr size_t kChunkOfFile = size_t{1} << 20;
  std::string path_, text_;
  std::optional<FileDescriptor> file_;
};

}  // namespace

MergedTrace merge_spans(const std::string& folder, const StepRange& steps,
                        const MergedSpans& consumer) {
  MergedTrace merged;
  std::vector<std::unique_ptr<RankCursor>> ranks;
  for (std::vector<std::string>& segments : span_segments(folder)) {
    ranks.push_back(std::make_unique<RankCursor>(
        RankCursor{SpanReader(int(ranks.size()), std::move(segments), steps), {}, {}}));
  }
  merged.ranks = int(ranks.size());
  const auto is_later = [](const RankCursor* a, const RankCursor* b) {
    return a->begin_ns() > b->begin_ns();
  };
  std::priority_queue<RankCursor*, std::vector<RankCursor*>, decltype(is_later)> queue(is_later);
  const auto read = [&](RankCursor& rank) {
    rank.event = rank.reader.next();
    if (rank.event) queue.push(&rank);
  };
  for (const auto& rank : ranks) read(*rank);
  if (queue.empty()) {
    throw IoError(fmt::format("{}: no events in these steps", printable(folder)));
  }
  const int64_t zero = queue.top()->begin_ns();
  FlowMatcher<ArrowEnd> matcher;
  while (!queue.empty()) {
    RankCursor& rank = *queue.top();
    queue.pop();
    const SpanEvent& event = *rank.event;
    const TraceSlice slice{rank.reader.rank(), track_of(event, rank.rows.add(event)),
                           Nanoseconds(std::max<int64_t>(rank.begin_ns() - zero, 0)),
                           std::max<Nanoseconds>(event.end - event.begin, Nanoseconds(0))};
    ++merged.events;
    consumer.slice(event, slice);
    matcher.add(rank.reader.rank(), event, Nanoseconds(rank.begin_ns()), {event, slice},
                consumer.arrow);
    const int64_t step = rank.reader.step();
    if (merged.first_step < 0) merged.first_step = step;
    if (step > merged.last_step) {
      merged.last_step = step;
      int64_t before = INT64_MAX;
      for (const auto& each : ranks) before = std::min(before, each->reader.before_ns());
      matcher.forget_before(Nanoseconds(before));
    }
    read(rank);
  }
  for (const auto& rank : ranks) {
    merged.clock_bound = std::max(merged.clock_bound, Nanoseconds(rank->reader.clock_bound_ns()));
    merged.dropped += rank->reader.dropped();
  }
  return merged;
}

MergedFile write_merged_trace(const std::string& folder, const StepRange& steps,
                              const std::string& file) {
  MergedFile merged;
  ChunkedFile out(file);
  const char* separator = "";
  const auto add = [&](std::string_view line) {
    out.add(separator);
    out.add(line);
    separator = ",\n";
  };
  std::set<int> named_ranks;
  std::set<std::pair<int, int>> named_tracks;
  out.add("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n");
  MergedSpans consumer;
  consumer.slice = [&](const SpanEvent& event, const TraceSlice& slice) {
    if (named_ranks.insert(slice.rank).second) add(rank_lines(slice.rank));
    if (named_tracks.insert({slice.rank, slice.track}).second) {
      add(track_lines(slice.rank, slice.track));
    }
    add(slice_line(event, slice));
  };
  consumer.arrow = [&](const ArrowEnd& from, const ArrowEnd& to) {
    const ArrowText text{
        size_t(++merged.arrows), from.event.name, from.event.flow.role == FlowRole::collective,
        from.event.microbatch,   from.slice,      to.slice};
    const ArrowTimes times = arrow_times(from.slice, to.slice, text.is_collective);
    merged.backward = std::max(merged.backward, times.backward);
    const auto [start, end] = arrow_lines(text, times);
    add(start);
    add(end);
  };
  merged.trace = merge_spans(folder, steps, consumer);
  out.add(fmt::format(
      "\n],\"otherData\":{{\"step\":{},\"last_step\":{},\"clock_bound_us\":{},\"backward_us\":{},"
      "\"dropped_events\":{}}}}}\n",
      merged.trace.first_step, merged.trace.last_step, microseconds(merged.trace.clock_bound),
      microseconds(merged.backward), merged.trace.dropped));
  out.flush();
  return merged;
}

}  // namespace tandem
