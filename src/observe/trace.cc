#include "observe/trace.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "core/system/output.h"
#include "observe/flow_matcher.h"
#include "observe/trace_text.h"
#include "tandem/error.h"

namespace tandem {
namespace {

using Nanoseconds = std::chrono::nanoseconds;

struct PackedHeader {
  char magic[8];
  int64_t rank, events, origin_ns;
};
struct PackedEvent {
  int64_t begin_ns, end_ns;
  int64_t flow_number;
  uint32_t flow_stream;
  int32_t flow_ranks, tile, peer, processor, microbatch, stage;
  uint16_t kind, name_bytes;
  uint8_t flow_role, unused[7];
};
constexpr char kMagic[9] = "tdmspan3";
constexpr uint16_t kMaxName = 256;

int64_t to_ns(TimePoint t) {
  return std::chrono::duration_cast<Nanoseconds>(t.time_since_epoch()).count();
}
TimePoint from_ns(int64_t ns) {
  return TimePoint(std::chrono::duration_cast<TimePoint::duration>(Nanoseconds(ns)));
}

std::vector<size_t> by_begin(std::span<const SpanEvent> events) {
  std::vector<size_t> order(events.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return events[a].begin < events[b].begin; });
  return order;
}

}  // namespace

const char* intern(std::string name) {
  static std::mutex mutex;
  static std::set<std::string> names;
  const std::lock_guard lock(mutex);
  return names.insert(std::move(name)).first->c_str();
}

std::vector<int> lane_rows(std::span<const SpanEvent> events) {
  std::vector<int> rows(events.size());
  LaneRows lanes;
  for (const size_t i : by_begin(events)) rows[i] = lanes.add(events[i]);
  return rows;
}

std::vector<std::byte> pack(const RankEvents& rank) {
  std::vector<std::byte> blob;
  const auto append = [&](const void* data, size_t bytes) {
    blob.resize(blob.size() + bytes);
    std::memcpy(blob.data() + blob.size() - bytes, data, bytes);
  };
  PackedHeader header{{}, rank.rank, int64_t(rank.events.size()), to_ns(rank.origin)};
  std::memcpy(header.magic, kMagic, sizeof header.magic);
  append(&header, sizeof header);
  for (const SpanEvent& event : rank.events) {
    const auto length = uint16_t(std::min<size_t>(std::strlen(event.name), kMaxName));
    const PackedEvent packed{.begin_ns = to_ns(event.begin),
                             .end_ns = to_ns(event.end),
                             .flow_number = event.flow.number,
                             .flow_stream = event.flow.stream,
                             .flow_ranks = event.flow.ranks,
                             .tile = event.tile,
                             .peer = event.peer,
                             .processor = event.processor,
                             .microbatch = event.microbatch,
                             .stage = event.stage,
                             .kind = uint16_t(event.kind),
                             .name_bytes = length,
                             .flow_role = uint8_t(event.flow.role),
                             .unused = {}};
    append(&packed, sizeof packed);
    append(event.name, length);
  }
  return blob;
}

RankEvents unpack(std::span<const std::byte> blob) {
  const auto take = [&](void* to, size_t bytes) {
    if (blob.size() < bytes) throw InvalidArgument("packed events: cut short");
    std::memcpy(to, blob.data(), bytes);
    blob = blob.subspan(bytes);
  };
  PackedHeader header;
  take(&header, sizeof header);
  if (std::memcmp(header.magic, kMagic, sizeof header.magic) != 0) {
    throw InvalidArgument("packed events: wrong first bytes, expected tdmspan3");
  }
  RankEvents rank{int(header.rank), {}, from_ns(header.origin_ns)};
  for (int64_t i = 0; i < header.events; ++i) {
    PackedEvent packed;
    take(&packed, sizeof packed);
    if (packed.kind >= kSpanKinds || packed.name_bytes > kMaxName || packed.processor < -1 ||
        packed.processor > kMaxProcessor || packed.flow_role > int(FlowRole::collective)) {
      throw InvalidArgument(fmt::format(
          "packed event {}: kind {}, name of {} bytes, processor {}, role {}: out of range", i,
          packed.kind, packed.name_bytes, packed.processor, packed.flow_role));
    }
    std::string name(packed.name_bytes, '\0');
    take(name.data(), name.size());
    rank.events.push_back(
        {SpanKind(packed.kind),
         intern(std::move(name)),
         from_ns(packed.begin_ns),
         from_ns(packed.end_ns),
         packed.tile,
         packed.peer,
         packed.processor,
         {FlowRole(packed.flow_role), packed.flow_ranks, packed.flow_stream, packed.flow_number},
         packed.microbatch,
         packed.stage});
  }
  return rank;
}

namespace {

/// Arrows of spans that say which message or call they belong to.
void add_flows(std::span<const RankEvents> ranks, std::vector<Arrow>& result) {
  struct Index {
    size_t rank, event;
  };
  FlowMatcher<Index> matcher;
  for (size_t r = 0; r < ranks.size(); ++r) {
    for (size_t i = 0; i < ranks[r].events.size(); ++i) {
      const SpanEvent& event = ranks[r].events[i];
      matcher.add(ranks[r].rank, event, event.begin - ranks[r].origin, {r, i},
                  [&](const Index& from, const Index& to) {
                    result.push_back({from.rank, from.event, to.rank, to.event});
                  });
    }
  }
}

/// Transfers from one rank to another.
class Arrivals {
 public:
  struct Transfer {
    size_t rank, event;
    Nanoseconds arrival;
    int tile;
  };
  void add(const Transfer& transfer) { transfers_.push_back(transfer); }
  void sort() {
    std::ranges::stable_sort(transfers_, {}, &Transfer::arrival);
    for (size_t i = 0; i < transfers_.size(); ++i) by_tile_[transfers_[i].tile].push_back(i);
  }
  /// Last transfer that arrives in [begin, end], of the tile if both have one.
  const Transfer* find(Nanoseconds begin, Nanoseconds end, int tile) const {
    const auto later = std::ranges::upper_bound(transfers_, end, {}, &Transfer::arrival);
    const auto count = size_t(later - transfers_.begin());
    const size_t found = tile < 0 ? count : std::max(before(count, tile), before(count, -1));
    if (found == 0 || transfers_[found - 1].arrival < begin) return nullptr;
    return &transfers_[found - 1];
  }

 private:
  /// Number of transfers up to the last one of the tile among the first `count`; 0 if there is
  /// none.
  size_t before(size_t count, int tile) const {
    const auto of_tile = by_tile_.find(tile);
    if (of_tile == by_tile_.end()) return 0;
    const auto at = std::ranges::lower_bound(of_tile->second, count);
    return at == of_tile->second.begin() ? 0 : *std::prev(at) + 1;
  }

  std::vector<Transfer> transfers_;
  std::map<int, std::vector<size_t>> by_tile_;  // indices
};

/// Arrows of other spans, by their times.
void add_arrivals(std::span<const RankEvents> ranks, std::vector<Arrow>& result) {
  std::map<std::pair<int, int>, Arrivals> transfers;  // by source and destination
  for (size_t r = 0; r < ranks.size(); ++r) {
    for (size_t i = 0; i < ranks[r].events.size(); ++i) {
      const SpanEvent& event = ranks[r].events[i];
      const bool has_flow = event.flow.role != FlowRole::none;
      if (event.kind != SpanKind::transfer || event.peer < 0 || has_flow) continue;
      transfers[{ranks[r].rank, event.peer}].add(
          {r, i, event.end - ranks[r].origin, std::max(event.tile, -1)});
    }
  }
  for (auto& [pair, of_pair] : transfers) of_pair.sort();
  for (size_t r = 0; r < ranks.size(); ++r) {
    for (size_t i = 0; i < ranks[r].events.size(); ++i) {
      const SpanEvent& wait = ranks[r].events[i];
      const auto of_pair = transfers.find({wait.peer, ranks[r].rank});
      const bool has_flow = wait.flow.role != FlowRole::none;
      if (wait.kind != SpanKind::wait || has_flow || of_pair == transfers.end()) continue;
      const auto* const found =
          of_pair->second.find(wait.begin - ranks[r].origin, wait.end - ranks[r].origin, wait.tile);
      if (found) result.push_back({found->rank, found->event, r, i});
    }
  }
}

struct TraceLine {
  Nanoseconds at;
  std::string text;
};

std::string other_data(std::span<const RankEvents> ranks, Nanoseconds backward) {
  int64_t bound = -1, step = ranks.empty() ? -1 : ranks[0].step;
  for (const RankEvents& rank : ranks) bound = std::max(bound, rank.clock_bound_ns);
  std::vector<std::string> data;
  if (step >= 0) data.push_back(fmt::format("\"step\":{}", step));
  if (bound >= 0) {
    data.push_back(fmt::format("\"clock_bound_us\":{}", microseconds(Nanoseconds(bound))));
    data.push_back(fmt::format("\"backward_us\":{}", microseconds(backward)));
  }
  return data.empty() ? "" : fmt::format("\"otherData\":{{{}}},", fmt::join(data, ","));
}

}  // namespace

std::vector<Arrow> arrows(std::span<const RankEvents> ranks) {
  std::vector<Arrow> result;
  add_flows(ranks, result);
  add_arrivals(ranks, result);
  return result;
}

std::string trace_json(std::span<const RankEvents> ranks) {
  Nanoseconds zero = Nanoseconds::max();
  for (const RankEvents& rank : ranks) {
    for (const SpanEvent& event : rank.events) {
      zero = std::min<Nanoseconds>(zero, event.begin - rank.origin);
    }
  }
  std::vector<TraceLine> lines;
  std::vector<std::string> head;
  std::vector<std::vector<TraceSlice>> slices(ranks.size());
  for (size_t r = 0; r < ranks.size(); ++r) {
    const RankEvents& rank = ranks[r];
    const std::vector<int> rows = lane_rows(rank.events);
    slices[r].resize(rank.events.size());
    head.push_back(rank_lines(rank.rank));
    std::set<int> used;
    for (const size_t i : by_begin(rank.events)) {
      const SpanEvent& event = rank.events[i];
      slices[r][i] = {rank.rank, track_of(event, rows[i]), event.begin - rank.origin - zero,
                      std::max<Nanoseconds>(event.end - event.begin, Nanoseconds(0))};
      used.insert(slices[r][i].track);
      lines.push_back({slices[r][i].at, slice_line(event, slices[r][i])});
    }
    for (const int track : used) head.push_back(track_lines(rank.rank, track));
  }
  size_t id = 0;
  Nanoseconds backward{0};
  for (const Arrow& arrow : arrows(ranks)) {
    const SpanEvent& from = ranks[arrow.from].events[arrow.transfer];
    const ArrowText text{++id,
                         from.name,
                         from.flow.role == FlowRole::collective,
                         from.microbatch,
                         slices[arrow.from][arrow.transfer],
                         slices[arrow.to][arrow.wait]};
    const ArrowTimes times = arrow_times(text.from, text.to, text.is_collective);
    backward = std::max(backward, times.backward);
    auto [start, end] = arrow_lines(text, times);
    lines.push_back({times.from, std::move(start)});
    lines.push_back({times.to, std::move(end)});
  }
  std::stable_sort(lines.begin(), lines.end(),
                   [](const TraceLine& a, const TraceLine& b) { return a.at < b.at; });

  std::string json = "{\"displayTimeUnit\":\"ms\"," + other_data(ranks, backward);
  json += "\"traceEvents\":[\n";
  const char* separator = "";
  for (const std::string& text : head) json += separator + text, separator = ",\n";
  for (const TraceLine& line : lines) json += separator + line.text, separator = ",\n";
  return json + "\n]}\n";
}

void write_trace(const std::filesystem::path& file, std::span<const RankEvents> ranks) {
  write_output(file, trace_json(ranks));
}

}  // namespace tandem
