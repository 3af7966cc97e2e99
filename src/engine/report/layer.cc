#include "engine/report/layer.h"

#include <algorithm>
#include <set>
#include <string_view>

namespace tandem {
namespace {

struct Window {
  TimePoint begin, end;
  bool repeats;
};

struct Operation {
  std::string_view name;
  TimePoint begin, end;
};

// Rank's computation in order, without GEMMs and without work of overlapped operators between their
// tiles (named like a wait): their number and order depend on timing.
std::vector<Operation> operations(const RankEvents& rank) {
  std::set<std::string_view> communicating;
  for (const SpanEvent& event : rank.events) {
    if (event.kind == SpanKind::wait || event.kind == SpanKind::transfer) {
      communicating.insert(event.name);
    }
  }
  std::vector<Operation> result;
  for (const SpanEvent& event : rank.events) {
    if (event.kind == SpanKind::compute && !communicating.contains(event.name)) {
      result.push_back({event.name, event.begin, event.end});
    }
  }
  std::stable_sort(result.begin(), result.end(),
                   [](const auto& a, const auto& b) { return a.begin < b.begin; });
  return result;
}

// A layer has several different operations, and there are at least two layers.
constexpr size_t kFewestOperations = 3, kFewestNames = 3;

TimePoint latest_end(const RankEvents& rank) {
  TimePoint end = TimePoint::min();
  for (const SpanEvent& event : rank.events) end = std::max(end, event.end);
  return end;
}

Window layer_window(const RankEvents& rank) {
  const auto ops = operations(rank);
  for (size_t period = kFewestOperations; 2 * period <= ops.size(); ++period) {
    size_t matches = 0;
    for (size_t i = 0; i + period < ops.size(); ++i) {
      matches = ops[i].name == ops[i + period].name ? matches + 1 : 0;
      if (matches < period) continue;
      std::set<std::string_view> names;
      for (size_t j = 0; j < period; ++j) names.insert(ops[i - j].name);
      if (names.size() < kFewestNames) continue;
      const size_t first = i + 1, last = i + period;
      return {ops[first].begin, last + 1 < ops.size() ? ops[last + 1].begin : latest_end(rank),
              true};
    }
  }
  TimePoint begin = TimePoint::max();
  for (const SpanEvent& event : rank.events) begin = std::min(begin, event.begin);
  return {begin, latest_end(rank), false};
}

}  // namespace

Layer one_layer(std::span<const RankEvents> ranks) {
  Layer layer;
  if (ranks.empty() || ranks.front().events.empty()) return layer;
  const Window window = layer_window(ranks.front());
  const auto start = window.begin - ranks.front().origin;
  const auto stop = window.end - ranks.front().origin;
  layer.span = stop - start;
  layer.repeats = window.repeats;
  for (const RankEvents& rank : ranks) {
    RankEvents& clipped = layer.ranks.emplace_back(RankEvents{rank.rank, {}, {}});
    for (SpanEvent event : rank.events) {
      const auto begin = std::max(event.begin - rank.origin, start);
      const auto end = std::min(event.end - rank.origin, stop);
      event.begin = TimePoint(begin - start), event.end = TimePoint(end - start);
      if (begin < end) clipped.events.push_back(event);
    }
  }
  return layer;
}

}  // namespace tandem
