// Offset between two clocks, estimated from pings, and the map of one clock onto the other.
#pragma once

#include <chrono>
#include <cstdint>
#include <span>
#include <vector>

#include "observe/recorder.h"

namespace tandem {

/// One round of a ping, in nanoseconds. The reference entered the round at `sent` and left it at
/// `received` on its clock, the remote rank at `remote_sent` and `remote_received` on its clock.
/// Neither left before the other had entered.
struct ClockSample {
  int64_t sent = 0, received = 0;
  int64_t remote_sent = 0, remote_received = 0;
};

/// Remote clock minus reference clock, at time `at` of the remote clock. The true offset differs
/// from `offset` by at most `bound`, however unequal the delays of both directions are.
struct ClockOffset {
  int64_t at = 0, offset = 0, bound = 0;
};

/// Offset that all rounds allow: a round confines it to [remote_sent - received, remote_received -
/// sent], widened by a drift of 100 ppm since then. Zero if that is allowed, as ranks of one host
/// share a clock; else the middle. Rounds that contradict each other (a clock that jumped) leave
/// the last consistent rounds. Throws InvalidArgument without samples, or if a round ended before
/// it began.
ClockOffset estimate_offset(std::span<const ClockSample> samples);

/// Offset at time `at` of the remote clock: linear between `first` and `last`.
int64_t offset_at(const ClockOffset& first, const ClockOffset& last, int64_t at);

/// Max error of a time between `first` and `last` that is moved by offset_at. Clocks that drift
/// more than 100 ppm have jumped: then anywhere between both offsets.
int64_t bound_between(const ClockOffset& first, const ClockOffset& last);

/// Moves events from the remote clock to that of the reference.
void align_events(std::vector<SpanEvent>& events, const ClockOffset& first,
                  const ClockOffset& last);

}  // namespace tandem
