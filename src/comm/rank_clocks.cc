#include "comm/rank_clocks.h"

#include <array>
#include <chrono>
#include <cstring>

#include "observe/recorder.h"
#include "tandem/error.h"

namespace tandem {
namespace {

constexpr size_t kClockRounds = 16;

struct ClockRound {
  int64_t begin, end;
};
using ClockRounds = std::array<ClockRound, kClockRounds>;

ClockRounds unpack_rounds(const std::vector<std::byte>& blob) {
  ClockRounds rounds;
  if (blob.size() != sizeof rounds) {
    throw InvalidArgument("clock rounds: every rank must send as many");
  }
  std::memcpy(rounds.data(), blob.data(), sizeof rounds);
  return rounds;
}

}  // namespace

int64_t clock_ns() {
  return std::chrono::nanoseconds(recorder().now().time_since_epoch()).count();
}

std::vector<ClockOffset> rank_clocks(Communicator& world, const std::function<int64_t()>& now) {
  ClockRounds local;
  for (ClockRound& round : local) {
    round.begin = now();
    world.barrier("clocks");
    round.end = now();
  }
  const auto blobs = world.exchange(std::as_bytes(std::span(local)), "clock rounds");
  const ClockRounds reference = unpack_rounds(blobs[0]);
  std::vector<ClockOffset> clocks;
  for (const auto& blob : blobs) {
    const ClockRounds remote = unpack_rounds(blob);
    std::vector<ClockSample> samples;
    for (size_t i = 0; i < kClockRounds; ++i) {
      samples.push_back({reference[i].begin, reference[i].end, remote[i].begin, remote[i].end});
    }
    clocks.push_back(estimate_offset(samples));
  }
  clocks[0].bound = 0;  // the reference itself
  return clocks;
}

}  // namespace tandem
