#include "observe/trace_text.h"

#include <fmt/format.h>

#include <algorithm>

namespace tandem {
namespace {

using Nanoseconds = std::chrono::nanoseconds;

constexpr int kRowsPerLane = 1000;
enum Lane { kComputeLane, kWaitLane, kLinkLane, kRecomputeLane, kPassLane, kLanes };

Lane lane_of(SpanKind kind) {
  switch (kind) {
    case SpanKind::gemm:
    case SpanKind::compute:
    case SpanKind::data:
    case SpanKind::checkpoint:
      return kComputeLane;
    case SpanKind::wait:
      return kWaitLane;
    case SpanKind::transfer:
      return kLinkLane;
    case SpanKind::recompute:
      return kRecomputeLane;
    case SpanKind::pass:
      return kPassLane;
  }
  return kComputeLane;
}

std::string quoted(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\', out += c;
    } else if (static_cast<unsigned char>(c) < 0x20 || static_cast<unsigned char>(c) > 0x7e) {
      out += '?';
    } else {
      out += c;
    }
  }
  return out + '"';
}

std::string metadata(const char* what, int rank, int track, const std::string& args) {
  return fmt::format(R"({{"ph":"M","name":"{}","pid":{},"tid":{},"args":{{{}}}}})", what, rank,
                     track, args);
}

std::string flow_args(const Flow& flow) {
  if (flow.role == FlowRole::none) return {};
  return fmt::format(R"(,"flow":[{},{},{},{}])", int(flow.role), flow.stream, flow.number,
                     flow.ranks);
}

}  // namespace

std::string microseconds(Nanoseconds time) {
  return fmt::format("{:.3f}", double(time.count()) / 1e3);
}

int LaneRows::add(const SpanEvent& event) {
  std::vector<TimePoint>& tree = lanes_[{event.processor, lane_of(event.kind)}].tree;
  size_t rows = tree.size() / 2;
  if (tree[1] > event.begin) {  // none is free: twice as many
    std::vector<TimePoint> twice(4 * rows, TimePoint::min());
    std::ranges::copy(tree.begin() + ptrdiff_t(rows), tree.end(),
                      twice.begin() + ptrdiff_t(2 * rows));
    tree = std::move(twice);
    rows *= 2;
    for (size_t i = rows; i-- > 1;) tree[i] = std::min(tree[2 * i], tree[2 * i + 1]);
  }
  size_t at = 1;
  while (at < rows) at = tree[2 * at] <= event.begin ? 2 * at : 2 * at + 1;
  const int row = int(at - rows);
  tree[at] = event.end;
  while (at /= 2) tree[at] = std::min(tree[2 * at], tree[2 * at + 1]);
  return row;
}

int track_of(const SpanEvent& event, int row) {
  return 1 + ((event.processor + 1) * kLanes + lane_of(event.kind)) * kRowsPerLane + row;
}

std::string slice_line(const SpanEvent& event, const TraceSlice& slice) {
  std::string args = fmt::format(R"("kind":"{}")", name_of(event.kind));
  if (event.tile >= 0) args += fmt::format(R"(,"tile":{})", event.tile);
  if (event.peer >= 0) args += fmt::format(R"(,"peer":{})", event.peer);
  if (event.processor >= 0) args += fmt::format(R"(,"processor":{})", event.processor);
  if (event.microbatch >= 0) args += fmt::format(R"(,"microbatch":{})", event.microbatch);
  if (event.stage >= 0) args += fmt::format(R"(,"stage":{})", event.stage);
  args += flow_args(event.flow);
  return fmt::format(
      R"({{"ph":"X","name":{},"cat":"{}","pid":{},"tid":{},"ts":{},"dur":{},"args":{{{}}}}})",
      quoted(event.name), name_of(event.kind), slice.rank, slice.track, microseconds(slice.at),
      microseconds(slice.duration), args);
}

std::string rank_lines(int rank) {
  return metadata("process_name", rank, 0, fmt::format(R"("name":"rank {}")", rank)) + ",\n" +
         metadata("process_sort_index", rank, 0, fmt::format(R"("sort_index":{})", rank));
}

std::string track_lines(int rank, int track) {
  constexpr const char* kNames[kLanes] = {"compute", "wait", "link", "recompute", "pass"};
  const int row = (track - 1) % kRowsPerLane, lane = (track - 1) / kRowsPerLane;
  const int processor = lane / kLanes - 1;
  std::string name = kNames[lane % kLanes];
  if (processor >= 0) name = fmt::format("SM {} {}", processor, name);
  if (row > 0) name += fmt::format(" {}", row + 1);
  return metadata("thread_name", rank, track, fmt::format(R"("name":"{}")", name)) + ",\n" +
         metadata("thread_sort_index", rank, track, fmt::format(R"("sort_index":{})", track));
}

ArrowTimes arrow_times(const TraceSlice& from, const TraceSlice& to, bool is_collective) {
  constexpr Nanoseconds kInside{100};
  const auto inside = [&](const TraceSlice& slice) {
    return std::min(slice.duration / 2, kInside);
  };
  const Nanoseconds enters = to.at + to.duration - inside(to);
  const Nanoseconds earliest = is_collective ? from.at + inside(from) : from.at;
  const Nanoseconds leaves =
      is_collective ? earliest
                    : std::clamp(enters, earliest, from.at + from.duration - inside(from));
  return {leaves, std::max(enters, leaves), std::max(leaves - enters, Nanoseconds(0))};
}

std::pair<std::string, std::string> arrow_lines(const ArrowText& arrow, const ArrowTimes& times) {
  const auto line = [&](const char* phase, const TraceSlice& slice, Nanoseconds at,
                        const char* more) {
    return fmt::format(
        R"({{"ph":"{}","name":{},"cat":"{}","id":{},"pid":{},"tid":{},"ts":{}{}{}}})", phase,
        quoted(arrow.name), arrow.is_collective ? "collective" : "message", arrow.id, slice.rank,
        slice.track, microseconds(at), more,
        arrow.microbatch < 0 ? ""
                             : fmt::format(R"(,"args":{{"microbatch":{}}})", arrow.microbatch));
  };
  return {line("s", arrow.from, times.from, ""), line("f", arrow.to, times.to, R"(,"bp":"e")")};
}

}  // namespace tandem
