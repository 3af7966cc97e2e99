#include "engine/report/links.h"

#include <fmt/format.h>

#include <algorithm>
#include <compare>
#include <utility>

#include "core/median.h"
#include "core/system/files.h"
#include "observe/span_stream.h"
#include "observe/trace.h"
#include "observe/trace_merge.h"

namespace tandem::report {
namespace {

constexpr size_t kMaxTimes = 1024;

double ms_of(std::chrono::nanoseconds time) {
  return double(time.count()) / 1e6;
}

const RankPosition* find_position(std::span<const RankPosition> ranks, int rank) {
  const auto found = std::ranges::find(ranks, rank, &RankPosition::rank);
  return found == ranks.end() ? nullptr : &*found;
}

struct LinkMedian {
  int from, to;
  double ms;
  int64_t messages;
};

/// Links that are compared with each other.
struct Alike {
  std::string operation, axes;
  bool same_host, is_pair;
  auto operator<=>(const Alike&) const = default;
};

/// Replaces both directions between hosts by their mean.
void join_directions(std::map<Alike, std::vector<LinkMedian>>& alike) {
  std::map<Alike, std::vector<LinkMedian>> joined;
  for (auto& [key, links] : alike) {
    if (key.same_host) continue;
    std::vector<LinkMedian> single;
    for (const LinkMedian& link : links) {
      const auto back = std::ranges::find_if(links, [&](const LinkMedian& other) {
        return other.from == link.to && other.to == link.from;
      });
      if (back == links.end()) {
        single.push_back(link);
      } else if (link.from < link.to) {
        joined[{key.operation, key.axes, false, true}].push_back(
            {link.from, link.to, (link.ms + back->ms) / 2, link.messages + back->messages});
      }
    }
    links = std::move(single);
  }
  alike.merge(joined);
}

/// Times of a message between two spans; their times are from one origin.
LinkTimes::Message message_of(const SpanEvent& send, int from, double sent_ms, int to,
                              double waited_from_ms, double received_ms) {
  return {send.name, from, to, sent_ms, waited_from_ms, received_ms};
}

LinkReport read_stream(const std::string& folder, LinkTimes& times, double& bound_ms) {
  MergedSpans consumer;
  consumer.slice = [](const SpanEvent&, const TraceSlice&) {};
  consumer.arrow = [&](const ArrowEnd& from, const ArrowEnd& to) {
    if (from.event.flow.role != FlowRole::send) return;
    times.add(message_of(from.event, from.slice.rank, ms_of(from.slice.at), to.slice.rank,
                         ms_of(to.slice.at), ms_of(to.slice.at + to.slice.duration)));
  };
  const MergedTrace merged = merge_spans(folder, newest_steps(folder), consumer);
  bound_ms = ms_of(merged.clock_bound);
  return {true, 0, merged.first_step, merged.last_step, {}};
}

LinkReport read_file_of_trace(const std::string& path, LinkTimes& times, double& bound_ms) {
  const std::vector<RankEvents> ranks = read_trace(path, Source::no_link);
  for (const Arrow& arrow : arrows(ranks)) {
    const SpanEvent& send = ranks[arrow.from].events[arrow.transfer];
    const SpanEvent& wait = ranks[arrow.to].events[arrow.wait];
    if (send.flow.role != FlowRole::send) continue;
    const auto at = [](TimePoint time) { return ms_of(time.time_since_epoch()); };
    times.add(message_of(send, ranks[arrow.from].rank, at(send.begin), ranks[arrow.to].rank,
                         at(wait.begin), at(wait.end)));
  }
  const int64_t step = ranks.empty() ? -1 : ranks.front().step;
  bound_ms = ranks.empty() ? 0 : double(std::max<int64_t>(ranks.front().clock_bound_ns, 0)) / 1e6;
  return {true, 0, step, step, {}};
}

}  // namespace

std::string axes_between(const RankPosition& a, const RankPosition& b) {
  std::string axes;
  const auto add = [&](bool differs, const char* axis) {
    if (differs) axes += axes.empty() ? axis : fmt::format("+{}", axis);
  };
  add(a.tp != b.tp, "TP");
  add(a.cp != b.cp, "CP");
  add(a.dp != b.dp, "DP");
  add(a.pp != b.pp, "PP");
  return axes;
}

void LinkTimes::add(const Message& message) {
  constexpr double kMinWaitMs = .005;
  const double ms = message.received_ms - message.sent_ms;
  const bool waited = message.received_ms - message.waited_from_ms >= std::max(ms / 2, kMinWaitMs);
  if (message.from == message.to || !waited) return;
  const bool is_of_stages = message.operation.starts_with("pp_");
  const std::string operation(is_of_stages ? "stages" : message.operation);
  Times& times = links_[{operation, message.from, message.to}];
  ++times.messages;
  if (times.ms.size() < kMaxTimes) times.ms.push_back(float(ms));
}

int64_t LinkTimes::judged(const LinkOptions& options) const {
  std::map<std::pair<int, int>, bool> pairs;
  for (const auto& [link, times] : links_) {
    if (times.messages < options.min_messages) continue;
    pairs[{std::get<1>(link), std::get<2>(link)}] = true;
  }
  return int64_t(pairs.size());
}

std::vector<SlowLink> LinkTimes::find_slow(std::span<const RankPosition> ranks, int64_t steps,
                                           double clock_bound_ms,
                                           const LinkOptions& options) const {
  std::map<Alike, std::vector<LinkMedian>> alike;
  for (const auto& [link, times] : links_) {
    const auto& [operation, from, to] = link;
    const RankPosition *a = find_position(ranks, from), *b = find_position(ranks, to);
    if (!a || !b || times.messages < options.min_messages) continue;
    alike[{operation, axes_between(*a, *b), a->host == b->host, false}].push_back(
        {from, to, upper_median(times.ms), times.messages});
  }
  join_directions(alike);
  std::map<std::pair<int, int>, SlowLink> slow;
  for (const auto& [key, links] : alike) {
    const double error_ms = key.same_host || key.is_pair ? 0 : 2 * clock_bound_ms;
    for (const LinkMedian& link : links) {
      std::vector<float> others;
      for (const LinkMedian& other : links) {
        if (&other != &link) others.push_back(float(other.ms));
      }
      if (others.empty()) continue;
      const auto count = int64_t(others.size());
      const double usual = upper_median(std::move(others)), excess = link.ms - usual;
      if (usual <= 0 || link.ms < options.min_ratio * usual || excess < error_ms) continue;
      const double lost = excess * double(link.messages) / double(std::max<int64_t>(steps, 1));
      SlowLink& found = slow[{link.from, link.to}];
      if (found.lost_ms >= lost) continue;
      found = {link.from,       link.to, key.is_pair,   key.operation, link.ms,
               link.ms / usual, lost,    link.messages, count};
    }
  }
  std::vector<SlowLink> sorted;
  for (auto& [pair, link] : slow) sorted.push_back(std::move(link));
  std::ranges::stable_sort(sorted, std::greater<>(), &SlowLink::lost_ms);
  return sorted;
}

LinkReport read_links(const std::string& dir, std::span<const RankHistory> ranks) {
  LinkTimes times;
  LinkReport report;
  double bound_ms = 0;
  if (path_exists(dir + "/trace")) {
    report = read_stream(dir + "/trace", times, bound_ms);
  } else if (path_exists(dir + "/trace.json")) {
    report = read_file_of_trace(dir + "/trace.json", times, bound_ms);
  } else {
    return {};
  }
  std::vector<RankPosition> positions;
  for (const RankHistory& history : ranks) positions.push_back(history.position);
  report.judged = times.judged();
  report.slow = times.find_slow(positions, report.last_step - report.first_step + 1, bound_ms);
  return report;
}

}  // namespace tandem::report
