// Pairs the spans of messages and collectives of several ranks as they are read, in any order, for
// arrows of a trace. Memory: spans whose counterparts have not been read yet.
#pragma once

#include <chrono>
#include <compare>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "observe/recorder.h"

namespace tandem {

/// `Span`: a copyable reference to a span.
template <typename Span>
class FlowMatcher {
 public:
  using Time = std::chrono::nanoseconds;

  /// Adds a span of `rank` that begins at `begin` on a clock that all ranks share. Calls
  /// `found(from, to)` for a message's send and receive once both were added; for a collective
  /// once those of all its ranks were: from the rank that began last to each of the others.
  template <typename Found>
  void add(int rank, const SpanEvent& event, Time begin, const Span& span, const Found& found) {
    const Flow& flow = event.flow;
    if (flow.role == FlowRole::none || (flow.role != FlowRole::collective && event.peer < 0))
      return;
    if (flow.role == FlowRole::collective) return add_call(flow, begin, span, found);
    const bool is_send = flow.role == FlowRole::send;
    const Key key{flow.stream, flow.number, is_send ? rank : event.peer,
                  is_send ? event.peer : rank};
    auto& waiting = is_send ? receives_ : sends_;
    if (const auto other = waiting.find(key); other != waiting.end()) {
      const Span counterpart = other->second.span;
      waiting.erase(other);
      is_send ? found(span, counterpart) : found(counterpart, span);
      return;
    }
    (is_send ? sends_ : receives_).insert_or_assign(key, Pending{begin, span});
  }

  /// Forgets spans that began before `time`: of messages that no rank waited for, or whose records
  /// end.
  void forget_before(Time time) {
    const auto is_old = [&](const auto& entry) { return entry.second.begin < time; };
    std::erase_if(sends_, is_old);
    std::erase_if(receives_, is_old);
    std::erase_if(calls_, [&](const auto& entry) { return entry.second.front().begin < time; });
  }

 private:
  struct Key {
    uint32_t stream;
    int64_t number;
    int source, destination;
    auto operator<=>(const Key&) const = default;
  };
  struct Pending {
    Time begin;
    Span span;
  };

  template <typename Found>
  void add_call(const Flow& flow, Time begin, const Span& span, const Found& found) {
    std::vector<Pending>& call = calls_[{flow.stream, flow.number, flow.ranks, 0}];
    call.push_back({begin, span});
    if (call.size() < size_t(flow.ranks)) return;
    size_t last = 0;
    for (size_t i = 1; i < call.size(); ++i) {
      if (call[i].begin > call[last].begin) last = i;
    }
    for (size_t i = 0; i < call.size(); ++i) {
      if (i != last) found(call[last].span, call[i].span);
    }
    calls_.erase({flow.stream, flow.number, flow.ranks, 0});
  }

  std::map<Key, Pending> sends_, receives_;
  std::map<Key, std::vector<Pending>> calls_;
};

}  // namespace tandem
