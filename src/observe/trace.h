// Timeline of a run as Chrome trace JSON, which Perfetto (ui.perfetto.dev) and chrome://tracing
// open. One process per rank; its lanes are compute, wait and link, on GPUs those of every
// multiprocessor that has events. An arrow joins a transfer to the wait it ended, where the events
// say so.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "core/file_descriptor.h"
#include "observe/recorder.h"

namespace tandem {

/// One rank's events. Times are shown relative to `origin`: leave it zero when all ranks share a
/// clock (one host); else the moment at which the rank left a barrier.
struct RankEvents {
  int rank = 0;
  std::vector<SpanEvent> events;
  TimePoint origin{};
  int64_t step = -1;  ///< of training, the first in it; -1: of none
};

/// Largest SpanEvent::processor of a trace.
constexpr int kMaxProcessor = 9999;

/// For gathering events from other processes: `Communicator::exchange(pack(mine))`, then `unpack`.
std::vector<std::byte> pack(const RankEvents& rank);
/// Throws InvalidArgument when `blob` is not what `pack` made.
RankEvents unpack(std::span<const std::byte> blob);

/// A transfer (index into the events of rank `from`) and the wait of rank `to` that it ended: the
/// last one from that peer, of the same tile where both name one, that arrived during the wait.
struct Arrow {
  size_t from, transfer, to, wait;  ///< `from` and `to` index the span of RankEvents
};
std::vector<Arrow> arrows(std::span<const RankEvents> ranks);

/// Events of one lane may overlap (two transfers at once): each goes to the first row of its lane
/// (of its multiprocessor) that is free, so that no two slices of a row cross. One row number per
/// event.
std::vector<int> lane_rows(std::span<const SpanEvent> events);

/// The step is that of the first rank.
std::string trace_json(std::span<const RankEvents> ranks);
/// Writes `trace_json`. Throws IoError naming the file.
void write_trace(const std::filesystem::path& file, std::span<const RankEvents> ranks);
/// What `write_trace` wrote. Throws IoError naming the file and what is wrong with it.
std::vector<RankEvents> read_trace(const std::filesystem::path& file, Source source = Source::any);

/// A copy of `name` that lives as long as the process, for SpanEvent::name.
const char* intern(std::string name);

}  // namespace tandem
