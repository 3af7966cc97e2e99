// Timeline of a run as Chrome trace JSON, for Perfetto (ui.perfetto.dev) and chrome://tracing. One
// process per rank with lanes compute, wait and link, on GPUs for every SM that has events. Arrows
// connect ranks: from the send of a message to the wait for it, and from the rank that began a
// collective last to the ends of the other ranks' calls.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "core/system/file_descriptor.h"
#include "observe/recorder.h"

namespace tandem {

/// Events of one rank. Times are shown relative to `origin`: zero if all ranks share a clock (one
/// host); else the time at which the rank left a barrier.
struct RankEvents {
  int rank = 0;
  std::vector<SpanEvent> events;
  TimePoint origin{};
  int64_t step = -1;            ///< first training step covered; -1: none
  int64_t clock_bound_ns = -1;  ///< max error of the aligned times; -1: unknown
};

/// Max SpanEvent::processor of a trace.
constexpr int kMaxProcessor = 9999;

/// Serialization to gather events from other processes: `Communicator::exchange(pack(local))`, then
/// `unpack`.
std::vector<std::byte> pack(const RankEvents& rank);
/// Throws InvalidArgument if `blob` was not made by `pack`.
RankEvents unpack(std::span<const std::byte> blob);

/// Span (index into the events of rank `from`) that the wait of rank `to` ended with: of messages
/// and collectives by their Flow; of spans without one the last transfer from that peer that
/// arrived during the wait, of the same tile if both have one.
struct Arrow {
  size_t from, transfer, to, wait;  ///< `from` and `to` index the span of RankEvents
};
std::vector<Arrow> arrows(std::span<const RankEvents> ranks);

/// Row of each event. Events of one lane may overlap (two concurrent transfers): each goes to the
/// first free row of its lane (of its SM), so that no two slices of a row overlap.
std::vector<int> lane_rows(std::span<const SpanEvent> events);

/// The step is that of the first rank, `clock_bound_us` the largest bound of all ranks, if known,
/// and `backward_us` the max time by which an arrow would end before its begin.
std::string trace_json(std::span<const RankEvents> ranks);
/// Writes `trace_json`. Throws IoError with the file.
void write_trace(const std::filesystem::path& file, std::span<const RankEvents> ranks);
/// Reads a file written by `write_trace`. Throws IoError with the file and the error in it.
std::vector<RankEvents> read_trace(const std::filesystem::path& file, Source source = Source::any);

/// Copy of `name` with static lifetime, for SpanEvent::name.
const char* intern(std::string name);

}  // namespace tandem
