#include "engine/report/trace/trace_times.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <utility>

namespace tandem {
namespace {

using Interval = std::pair<TimePoint, TimePoint>;

/// Length of the union of the intervals.
double covered_us(std::vector<Interval> intervals) {
  std::sort(intervals.begin(), intervals.end());
  std::chrono::nanoseconds sum{0};
  TimePoint until = TimePoint::min();
  for (const auto& [begin, end] : intervals) {
    if (end <= until) continue;
    sum += end - std::max(begin, until);
    until = end;
  }
  return double(sum.count()) / 1e3;
}

struct Intervals {
  std::vector<Interval> gemm, busy, busy_or_waiting, transfer;
};

void add(Intervals& row, const SpanEvent& event) {
  const Interval interval{event.begin, event.end};
  switch (event.kind) {
    case SpanKind::gemm:
      row.gemm.push_back(interval);
      [[fallthrough]];
    case SpanKind::compute:
    case SpanKind::data:
    case SpanKind::checkpoint:
      row.busy.push_back(interval);
      [[fallthrough]];
    case SpanKind::wait:
      row.busy_or_waiting.push_back(interval);
      return;
    case SpanKind::transfer:
      row.transfer.push_back(interval);
      return;
    case SpanKind::recompute:  // the spans in it are counted
    case SpanKind::pass:
      return;
  }
}

}  // namespace

std::vector<RankTimes> rank_times(std::span<const RankEvents> ranks) {
  auto zero = std::chrono::nanoseconds::max();
  for (const RankEvents& rank : ranks) {
    for (const SpanEvent& event : rank.events) zero = std::min(zero, event.begin - rank.origin);
  }
  std::vector<RankTimes> result;
  for (const RankEvents& rank : ranks) {
    RankTimes& times = result.emplace_back(RankTimes{.rank = rank.rank});
    std::map<int, Intervals> rows;
    for (const SpanEvent& event : rank.events) {
      add(rows[event.processor], event);
      const std::chrono::nanoseconds end = event.end - rank.origin - zero;
      times.span_us = std::max(times.span_us, double(end.count()) / 1e3);
    }
    times.processors = int(rows.size()) - int(rows.contains(-1));
    for (const auto& [processor, row] : rows) {
      const double share = processor < 0 ? 1.0 : 1.0 / times.processors;
      const double gemm = covered_us(row.gemm), busy = covered_us(row.busy);
      times.gemm_us += share * gemm;
      times.compute_us += share * (busy - gemm);
      times.exposed_wait_us += share * (covered_us(row.busy_or_waiting) - busy);
      times.transfer_us += share * covered_us(row.transfer);
    }
  }
  return result;
}

std::string as_text(std::span<const RankTimes> times) {
  const bool gpus =
      std::any_of(times.begin(), times.end(), [](const RankTimes& t) { return t.processors > 0; });
  std::string text =
      fmt::format("{:>5}{} {:>10} {:>8} {:>8} {:>8} {:>8}\n", "rank", gpus ? "   SMs" : "", "us",
                  "GEMM %", "other %", "wait %", "sent %");
  for (const RankTimes& t : times) {
    const double percent = t.span_us > 0 ? 100 / t.span_us : 0;
    text +=
        fmt::format("{:>5}{} {:>10.1f} {:>8.1f} {:>8.1f} {:>8.1f} {:>8.1f}\n", t.rank,
                    gpus ? fmt::format(" {:>5}", t.processors) : "", t.span_us, t.gemm_us * percent,
                    t.compute_us * percent, t.exposed_wait_us * percent, t.transfer_us * percent);
  }
  return text;
}

}  // namespace tandem
