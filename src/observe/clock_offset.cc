#include "observe/clock_offset.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>

#include "tandem/error.h"

namespace tandem {
namespace {

constexpr int64_t kDriftDivisor = 10000;  // clocks drift by at most 100 ppm

}  // namespace

ClockOffset estimate_offset(std::span<const ClockSample> samples) {
  if (samples.empty()) throw InvalidArgument("clock offset: no samples: expected at least one");
  int64_t low = 0, high = 0;
  // Newest first: rounds before a jump of a clock contradict those after it.
  for (size_t i = samples.size(); i-- > 0;) {
    const ClockSample& sample = samples[i];
    const int64_t age = samples.back().remote_received - sample.remote_sent;
    const int64_t drift = std::max<int64_t>(age, 0) / kDriftDivisor + 1;
    const int64_t below = sample.remote_sent - sample.received - drift;
    const int64_t above = sample.remote_received - sample.sent + drift;
    if (sample.received < sample.sent || sample.remote_received < sample.remote_sent) {
      throw InvalidArgument(fmt::format("clock sample {}: expected an end after its begin", i));
    }
    const bool newest = i + 1 == samples.size();
    const int64_t new_low = newest ? below : std::max(low, below);
    const int64_t new_high = newest ? above : std::min(high, above);
    if (new_low > new_high) break;
    low = new_low, high = new_high;
  }
  const int64_t offset = low <= 0 && high >= 0 ? 0 : low + (high - low) / 2;
  return {samples.back().remote_received, offset, std::max(high - offset, offset - low)};
}

int64_t offset_at(const ClockOffset& first, const ClockOffset& last, int64_t at) {
  if (last.at <= first.at) return last.offset;
  const double share = double(at - first.at) / double(last.at - first.at);
  return first.offset + int64_t(share * double(last.offset - first.offset));
}

int64_t bound_between(const ClockOffset& first, const ClockOffset& last) {
  const int64_t bound = std::max(first.bound, last.bound);
  const int64_t moved = std::abs(last.offset - first.offset);
  const int64_t drift = std::abs(last.at - first.at) / kDriftDivisor;
  return moved > first.bound + last.bound + drift ? bound + moved : bound;
}

void align_events(std::vector<SpanEvent>& events, const ClockOffset& first,
                  const ClockOffset& last) {
  using Nanoseconds = std::chrono::nanoseconds;
  const auto align = [&](TimePoint& time) {
    const auto at = std::chrono::duration_cast<Nanoseconds>(time.time_since_epoch()).count();
    time -=
        std::chrono::duration_cast<TimePoint::duration>(Nanoseconds(offset_at(first, last, at)));
  };
  for (SpanEvent& event : events) align(event.begin), align(event.end);
}

}  // namespace tandem
