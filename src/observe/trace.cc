#include "observe/trace.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "core/output.h"
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
  int32_t tile, peer, processor;
  uint16_t kind, name_bytes;
};
constexpr char kMagic[9] = "tdmspan2";
constexpr uint16_t kMaxName = 256;

int64_t to_ns(TimePoint t) {
  return std::chrono::duration_cast<Nanoseconds>(t.time_since_epoch()).count();
}
TimePoint from_ns(int64_t ns) {
  return TimePoint(std::chrono::duration_cast<TimePoint::duration>(Nanoseconds(ns)));
}

enum Lane { kComputeLane = 0, kWaitLane = 1, kLinkLane = 2, kRecomputeLane = 3 };

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

std::string metadata(const char* what, int rank, int tid, const std::string& args) {
  return fmt::format(R"({{"ph":"M","name":"{}","pid":{},"tid":{},"args":{{{}}}}})", what, rank, tid,
                     args);
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
  std::map<std::pair<int, Lane>, std::vector<TimePoint>> free_at;
  for (const size_t i : by_begin(events)) {
    auto& lane = free_at[{events[i].processor, lane_of(events[i].kind)}];
    size_t row = 0;
    while (row < lane.size() && lane[row] > events[i].begin) ++row;
    if (row == lane.size()) lane.emplace_back();
    lane[row] = events[i].end;
    rows[i] = int(row);
  }
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
    const PackedEvent packed{to_ns(event.begin), to_ns(event.end),     event.tile, event.peer,
                             event.processor,    uint16_t(event.kind), length};
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
    throw InvalidArgument("packed events: wrong first bytes, expected tdmspan2");
  }
  RankEvents rank{int(header.rank), {}, from_ns(header.origin_ns)};
  for (int64_t i = 0; i < header.events; ++i) {
    PackedEvent packed;
    take(&packed, sizeof packed);
    if (packed.kind >= kSpanKinds || packed.name_bytes > kMaxName || packed.processor < -1 ||
        packed.processor > kMaxProcessor) {
      throw InvalidArgument(
          fmt::format("packed event {}: kind {}, name of {} bytes, processor {}: out of range", i,
                      packed.kind, packed.name_bytes, packed.processor));
    }
    std::string name(packed.name_bytes, '\0');
    take(name.data(), name.size());
    rank.events.push_back({SpanKind(packed.kind), intern(std::move(name)), from_ns(packed.begin_ns),
                           from_ns(packed.end_ns), packed.tile, packed.peer, packed.processor});
  }
  return rank;
}

std::vector<Arrow> arrows(std::span<const RankEvents> ranks) {
  // Transfers by (source, destination), in order of arrival.
  std::map<std::pair<int, int>, std::vector<std::pair<size_t, size_t>>> transfers;
  for (size_t r = 0; r < ranks.size(); ++r) {
    for (size_t i = 0; i < ranks[r].events.size(); ++i) {
      const SpanEvent& event = ranks[r].events[i];
      if (event.kind != SpanKind::transfer || event.peer < 0) continue;
      transfers[{ranks[r].rank, event.peer}].emplace_back(r, i);
    }
  }
  const auto arrival = [&](const std::pair<size_t, size_t>& at) {
    return ranks[at.first].events[at.second].end - ranks[at.first].origin;
  };
  for (auto& [pair, list] : transfers) {
    std::stable_sort(list.begin(), list.end(),
                     [&](const auto& a, const auto& b) { return arrival(a) < arrival(b); });
  }
  std::vector<Arrow> result;
  for (size_t r = 0; r < ranks.size(); ++r) {
    for (size_t i = 0; i < ranks[r].events.size(); ++i) {
      const SpanEvent& wait = ranks[r].events[i];
      const auto found = transfers.find({wait.peer, ranks[r].rank});
      if (wait.kind != SpanKind::wait || found == transfers.end()) continue;
      const auto& list = found->second;
      auto at = std::upper_bound(
          list.begin(), list.end(), wait.end - ranks[r].origin,
          [&](const auto& end, const auto& candidate) { return end < arrival(candidate); });
      while (at != list.begin() && arrival(*std::prev(at)) >= wait.begin - ranks[r].origin) {
        --at;
        const SpanEvent& transfer = ranks[at->first].events[at->second];
        if (transfer.tile >= 0 && wait.tile >= 0 && transfer.tile != wait.tile) continue;
        result.push_back({at->first, at->second, r, i});
        break;
      }
    }
  }
  return result;
}

std::string trace_json(std::span<const RankEvents> ranks) {
  Nanoseconds zero = Nanoseconds::max();
  for (const RankEvents& rank : ranks) {
    for (const SpanEvent& event : rank.events) {
      zero = std::min<Nanoseconds>(zero, event.begin - rank.origin);
    }
  }
  constexpr int kRowsPerLane = 1000, kLanes = 4;
  struct Line {
    Nanoseconds at;
    std::string text;
  };
  std::vector<Line> lines;
  std::vector<std::string> head;
  std::vector<std::vector<int>> tids(ranks.size());
  const auto us = [](Nanoseconds t) { return fmt::format("{:.3f}", double(t.count()) / 1e3); };

  for (size_t r = 0; r < ranks.size(); ++r) {
    const RankEvents& rank = ranks[r];
    const std::vector<int> rows = lane_rows(rank.events);
    tids[r].resize(rank.events.size());
    head.push_back(
        metadata("process_name", rank.rank, 0, fmt::format(R"("name":"rank {}")", rank.rank)));
    head.push_back(
        metadata("process_sort_index", rank.rank, 0, fmt::format(R"("sort_index":{})", rank.rank)));
    std::set<int> used;
    for (const size_t i : by_begin(rank.events)) {
      const SpanEvent& event = rank.events[i];
      const int lane = (event.processor + 1) * kLanes + lane_of(event.kind);
      const int tid = 1 + lane * kRowsPerLane + rows[i];
      tids[r][i] = tid;
      used.insert(tid);
      std::string args = fmt::format(R"("kind":"{}")", name_of(event.kind));
      if (event.tile >= 0) args += fmt::format(R"(,"tile":{})", event.tile);
      if (event.peer >= 0) args += fmt::format(R"(,"peer":{})", event.peer);
      if (event.processor >= 0) args += fmt::format(R"(,"processor":{})", event.processor);
      const Nanoseconds at = event.begin - rank.origin - zero;
      lines.push_back(
          {at,
           fmt::format(R"({{"ph":"X","name":{},"cat":"{}","pid":{},"tid":{},"ts":{},"dur":{},)"
                       R"("args":{{{}}}}})",
                       quoted(event.name), name_of(event.kind), rank.rank, tid, us(at),
                       us(std::max<Nanoseconds>(event.end - event.begin, Nanoseconds(0))), args)});
    }
    for (const int tid : used) {
      const char* lanes[] = {"compute", "wait", "link", "recompute"};
      const int row = (tid - 1) % kRowsPerLane, lane = (tid - 1) / kRowsPerLane;
      const int processor = lane / kLanes - 1;
      std::string name = lanes[lane % kLanes];
      if (processor >= 0) name = fmt::format("SM {} {}", processor, name);
      head.push_back(metadata(
          "thread_name", rank.rank, tid,
          fmt::format(R"("name":"{}")", row ? fmt::format("{} {}", name, row + 1) : name)));
      head.push_back(
          metadata("thread_sort_index", rank.rank, tid, fmt::format(R"("sort_index":{})", tid)));
    }
  }

  // A flow end must lie inside its slice to be bound to it.
  size_t id = 0;
  for (const Arrow& arrow : arrows(ranks)) {
    const auto middle = [&](size_t r, size_t i) {
      const SpanEvent& event = ranks[r].events[i];
      const Nanoseconds end = event.end - ranks[r].origin - zero;
      return end - std::min<Nanoseconds>((event.end - event.begin) / 2, Nanoseconds(100));
    };
    const Nanoseconds from = middle(arrow.from, arrow.transfer);
    const Nanoseconds to = std::max(from, middle(arrow.to, arrow.wait));
    const char* form = R"({{"ph":"{}","name":"arrival","cat":"arrival","id":{},"pid":{},"tid":{},)"
                       R"("ts":{}{}}})";
    lines.push_back({from, fmt::format(fmt::runtime(form), "s", ++id, ranks[arrow.from].rank,
                                       tids[arrow.from][arrow.transfer], us(from), "")});
    lines.push_back({to, fmt::format(fmt::runtime(form), "f", id, ranks[arrow.to].rank,
                                     tids[arrow.to][arrow.wait], us(to), R"(,"bp":"e")")});
  }
  std::stable_sort(lines.begin(), lines.end(),
                   [](const Line& a, const Line& b) { return a.at < b.at; });

  std::string json = "{\"displayTimeUnit\":\"ms\",";
  if (!ranks.empty() && ranks[0].step >= 0) {
    int64_t bound = -1;
    for (const RankEvents& rank : ranks) bound = std::max(bound, rank.clock_bound_ns);
    json += fmt::format("\"otherData\":{{\"step\":{}", ranks[0].step);
    if (bound >= 0) json += fmt::format(",\"clock_bound_us\":{}", us(Nanoseconds(bound)));
    json += "},";
  }
  json += "\"traceEvents\":[\n";
  const char* separator = "";
  for (const std::string& text : head) json += separator + text, separator = ",\n";
  for (const Line& line : lines) json += separator + line.text, separator = ",\n";
  return json + "\n]}\n";
}

void write_trace(const std::filesystem::path& file, std::span<const RankEvents> ranks) {
  write_output(file, trace_json(ranks));
}

}  // namespace tandem
