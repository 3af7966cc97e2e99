// Segments of spans of ranks that send each other messages and meet in calls, with clocks that are
// apart and drift.
#pragma once

#include <chrono>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "observe/span_stream.h"
#include "tandem/random.h"

namespace tandem {

struct GeneratedSpans {
  int ranks = 4;
  int64_t steps = 3;
  int messages = 5;              ///< of a step, from each even rank to the next one and back
  int filler = 0;                ///< spans of computation of a message
  int64_t max_bytes = 64 << 20;  ///< of a rank
  int64_t clock_steps = 16;      ///< between two measurements of the clocks
  bool measures_clocks = true;
  double max_ahead_s = 0, max_ppm = 0;  ///< of the ranks' clocks
  int64_t bound_ns = 20'000;            ///< of their measurements, whose errors are smaller
  double slow_factor = 1;               ///< of messages from slow_from to slow_to
  int slow_from = -1, slow_to = -1, late_rank = -1;  ///< late: computes twice as long

  static constexpr int64_t kUnit = 100'000;  ///< ns: span of computation, time of a message
  static constexpr int64_t kOrigin = 1'000'000'000'000;

  int64_t step_ns() const { return (8 * messages + 40) * kUnit; }
  /// Clock of a rank at a time of that of rank 0.
  int64_t clock_at(int rank, int64_t ns) const {
    if (rank == 0) return ns;
    const double ahead = std::sin(7.0 * rank) * max_ahead_s, ppm = rank % 2 ? max_ppm : -max_ppm;
    return ns + int64_t(ahead * 1e9) + int64_t(double(ns - kOrigin) * ppm * 1e-6);
  }
  TimePoint point(int rank, int64_t ns) const {
    return TimePoint(std::chrono::nanoseconds(clock_at(rank, ns)));
  }
  int64_t transit(int from, int to) const {
    return from == slow_from && to == slow_to ? int64_t(double(kUnit) * slow_factor) : kUnit;
  }

  /// Spans of a step on the rank's clock, in order of their ends.
  std::vector<SpanEvent> events(int rank, int64_t step) const {
    std::vector<SpanEvent> events;
    int64_t now = kOrigin + step * step_ns();
    const int peer = rank ^ 1;
    const auto add = [&](SpanKind kind, const char* name, int64_t begin, int64_t end, int to,
                         const Flow& flow, int microbatch) {
      events.push_back({kind, name, point(rank, begin), point(rank, end), -1, to, -1, flow,
                        microbatch, rank % 2});
    };
    for (int i = 0; i < messages; ++i) {
      const int64_t number = step * messages + i;
      const int64_t work = kUnit * (rank == late_rank ? 2 : 1);
      for (int j = 0; j < filler; ++j) {
        add(SpanKind::compute, "fill", now + work * j / filler, now + work * (j + 1) / filler, -1,
            {}, i);
      }
      // Even ranks send at 2 units and receive the answer that odd ones send after they have it.
      const int even = rank & ~1, odd = rank | 1;
      const int64_t sent = now + (even == late_rank ? 4 : 2) * kUnit;
      const int64_t there = sent + transit(even, odd);
      const int64_t answered = there + (odd == late_rank ? 3 : 1) * kUnit;
      const int64_t back = answered + transit(odd, even);
      const Flow out{FlowRole::send, 0, 1, number}, in{FlowRole::receive, 0, 1, number};
      if (rank % 2 == 0) {
        add(SpanKind::transfer, "ring", sent, sent + kUnit / 2, peer, out, i);
        add(SpanKind::wait, "ring", sent + kUnit / 2, back, peer, in, i);
      } else {
        add(SpanKind::wait, "ring", now + kUnit, there, peer, in, i);
        add(SpanKind::transfer, "ring", answered, answered + kUnit / 2, peer, out, i);
      }
      now += 8 * kUnit;
    }
    const int64_t joined = now + 10 * kUnit + kUnit / 4 * ((rank + step) % ranks);
    add(SpanKind::wait, "sums", joined, now + 30 * kUnit, -1,
        {FlowRole::collective, ranks, 2, step}, -1);
    return events;
  }

  ClockOffset measured(int rank, int64_t ns) const {
    const int64_t at = clock_at(rank, ns);
    if (rank == 0 || bound_ns == 0) return {at, at - ns, 0};
    const auto words = philox(5, uint64_t(rank), uint64_t(ns));
    const int64_t error = int64_t(words[0] % uint64_t(2 * bound_ns)) - bound_ns;
    return {at, at - ns + error, bound_ns};
  }

  void write(const std::string& folder) const {
    for (int rank = 0; rank < ranks; ++rank) {
      SpanWriter writer(folder, rank, ranks, max_bytes);
      for (int64_t step = 0; step < steps; ++step) {
        if (measures_clocks && step % clock_steps == 0) {
          writer.add_clock(measured(rank, kOrigin + step * step_ns()));
        }
        writer.add_events(step + 1, events(rank, step), 0);
      }
      if (measures_clocks) writer.add_clock(measured(rank, kOrigin + steps * step_ns()));
    }
  }

  int64_t arrows_of_step() const { return ranks * messages + ranks - 1; }
};

}  // namespace tandem
