#include "engine/report/trace/layer.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string_view>
#include <vector>

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

/// Lengths of equal sequences of names in logarithmic time, by hashes of prefixes modulo 2^61 - 1.
class NameHashes {
 public:
  explicit NameHashes(std::span<const uint32_t> names) : hashes_{0}, powers_{1} {
    for (const uint32_t name : names) {
      hashes_.push_back((multiply(hashes_.back(), kBase) + name + 1) % kModulus);
      powers_.push_back(multiply(powers_.back(), kBase));
    }
  }
  /// Max length up to `limit` of equal sequences that begin at a and b, or with `backward` end
  /// before them.
  size_t common(size_t a, size_t b, size_t limit, bool backward) const {
    size_t low = 0;
    for (size_t high = limit; low < high;) {
      const size_t middle = (low + high + 1) / 2, back = backward ? middle : 0;
      if (hash(a - back, middle) == hash(b - back, middle)) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return low;
  }

 private:
  static constexpr uint64_t kModulus = (uint64_t{1} << 61) - 1, kBase = 0x1fb9'8d1b'7a3c'55e7;
  __extension__ using Wide = unsigned __int128;
  static uint64_t multiply(uint64_t a, uint64_t b) { return uint64_t(Wide(a) * b % kModulus); }
  uint64_t hash(size_t begin, size_t count) const {
    return (hashes_[begin + count] + kModulus - multiply(hashes_[begin], powers_[count])) %
           kModulus;
  }

  std::vector<uint64_t> hashes_, powers_;
};

/// By position: distance to the last of the first `kFewestNames` different names from there on.
std::vector<size_t> distances_to_names(std::span<const uint32_t> names) {
  std::vector<size_t> distances(names.size(), names.size());
  std::map<uint32_t, size_t> counts;
  size_t end = 0;
  for (size_t begin = 0; begin < names.size(); ++begin) {
    for (; end < names.size() && counts.size() < kFewestNames; ++end) ++counts[names[end]];
    if (counts.size() < kFewestNames) break;
    distances[begin] = end - 1 - begin;
    if (--counts[names[begin]] == 0) counts.erase(names[begin]);
  }
  return distances;
}

/// Index of the first name of the second of two equal sequences of `period` names, which follow one
/// another and have `kFewestNames` different ones; nullopt if there are none.
std::optional<size_t> find_repeat(std::span<const uint32_t> names,
                                  std::span<const size_t> distances, size_t period) {
  size_t matches = 0;
  for (size_t i = 0; i + period < names.size(); ++i) {
    matches = names[i] == names[i + period] ? matches + 1 : 0;
    if (matches >= period && distances[i + 1 - period] < period) return i + 1;
  }
  return {};
}

struct Repeat {
  size_t second = 0, period = 0;
};

/// The first repeat of the shortest period. For each period, names at its multiples are compared:
/// two equal sequences contain one that equals the name a period later. That is n log n
/// comparisons.
std::optional<Repeat> shortest_repeat(std::span<const uint32_t> names) {
  const std::vector<size_t> distances = distances_to_names(names);
  const NameHashes hashes(names);
  for (size_t period = kFewestOperations; 2 * period <= names.size(); ++period) {
    for (size_t i = 0; i + period < names.size(); i += period) {
      if (names[i] != names[i + period]) continue;
      const size_t after =
          hashes.common(i, i + period, std::min(period, names.size() - i - period), false);
      const size_t before = hashes.common(i, i + period, std::min(period - 1, i), true);
      // Sequences of a period in between all have the same names.
      if (after + before < period || distances[i - before] >= period) continue;
      if (const auto second = find_repeat(names, distances, period)) return Repeat{*second, period};
      break;  // equal hashes of different names
    }
  }
  return {};
}

Window layer_window(const RankEvents& rank) {
  const auto ops = operations(rank);
  std::map<std::string_view, uint32_t> numbers;
  std::vector<uint32_t> names;
  for (const Operation& op : ops) {
    names.push_back(numbers.try_emplace(op.name, uint32_t(numbers.size())).first->second);
  }
  if (const auto repeat = shortest_repeat(names)) {
    const size_t end = repeat->second + repeat->period;
    return {ops[repeat->second].begin, end < ops.size() ? ops[end].begin : latest_end(rank), true};
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
