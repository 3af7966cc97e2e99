#include "observe/clock_offset.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <random>

#include "observe/trace.h"
#include "tandem/error.h"

namespace tandem {
namespace {

constexpr int64_t kMicrosecond = 1000, kSecond = 1'000'000'000;

// A remote clock that reads `offset` more than the reference at zero and drifts by `ppm`.
struct RemoteClock {
  int64_t offset;
  double ppm;
  int64_t at(int64_t reference) const {
    return reference + offset + int64_t(std::llround(double(reference) * ppm * 1e-6));
  }
};

// Rounds from `begin` on, with delays of up to `there` and `back` nanoseconds each way.
std::vector<ClockSample> pings(std::mt19937& random, const RemoteClock& clock, int64_t begin,
                               int64_t there, int64_t back) {
  std::uniform_int_distribution<int64_t> forth(1, there), reverse(1, back),
      pause(1, 50 * kMicrosecond);
  std::vector<ClockSample> samples;
  for (int i = 0; i < 16; ++i) {
    const int64_t sent = begin, remote = sent + forth(random);
    const int64_t replied = remote + pause(random), received = replied + reverse(random);
    samples.push_back({sent, received, clock.at(remote), clock.at(replied)});
    begin = received + pause(random);
  }
  return samples;
}

TEST(ClockOffset, ErrorIsWithinItsBoundForAllDelaysAndDrifts) {
  std::mt19937 random(7);
  std::uniform_int_distribution<int64_t> offsets(-100 * kSecond, 100 * kSecond),
      delays(2 * kMicrosecond, 3000 * kMicrosecond);
  std::uniform_real_distribution<double> drifts(-50, 50);
  for (int trial = 0; trial < 2000; ++trial) {
    const RemoteClock clock{offsets(random), drifts(random)};
    const int64_t there = delays(random), back = delays(random);
    const auto first = estimate_offset(pings(random, clock, 10 * kSecond, there, back));
    const auto last = estimate_offset(pings(random, clock, 70 * kSecond, back, there));
    const int64_t bound = std::max(first.bound, last.bound);
    EXPECT_LE(bound, there + back + 200 * kMicrosecond);
    for (const int64_t t : {11, 25, 40, 69}) {
      const int64_t shown = clock.at(t * kSecond);
      const int64_t error = shown - offset_at(first, last, shown) - t * kSecond;
      EXPECT_LE(std::abs(error), bound + 10) << "trial " << trial << " at " << t << " s";
    }
  }
}

TEST(ClockOffset, SharedClockIsNotMoved) {
  std::mt19937 random(3);
  const auto found = estimate_offset(pings(random, {0, 0}, kSecond, 10'000, 900'000));
  EXPECT_EQ(found.offset, 0);
  EXPECT_GT(found.bound, 0);
}

TEST(ClockOffset, RoundsAfterAJumpCount) {
  std::mt19937 random(5);
  auto samples = pings(random, {kSecond, 0}, kSecond, 20'000, 20'000);
  const auto later = pings(random, {9 * kSecond, 0}, 2 * kSecond, 20'000, 20'000);
  samples.insert(samples.end(), later.begin(), later.end());
  const auto found = estimate_offset(samples);
  EXPECT_LE(std::abs(found.offset - 9 * kSecond), found.bound);
  EXPECT_LE(found.bound, 8 * kSecond / 1000);
}

TEST(ClockOffset, BadSamplesAreRefused) {
  EXPECT_THROW(estimate_offset({}), InvalidArgument);
  const std::vector<ClockSample> reversed{{5, 4, 0, 1}};
  EXPECT_THROW(estimate_offset(reversed), InvalidArgument);
}

TEST(ClockOffset, AlignedArrowsNeverGoBackByMoreThanTheBound) {
  std::mt19937 random(11);
  const RemoteClock clock{-100 * kSecond, 50};
  const auto first = estimate_offset(pings(random, clock, 10 * kSecond, 30'000, 400'000));
  const auto last = estimate_offset(pings(random, clock, 40 * kSecond, 400'000, 30'000));
  const auto point = [](int64_t ns) { return TimePoint(std::chrono::nanoseconds(ns)); };
  std::vector<RankEvents> ranks{{0, {}, {}}, {1, {}, {}}};
  for (int64_t at = 11 * kSecond; at < 40 * kSecond; at += kSecond / 4) {
    const int64_t end = at + 5000 * kMicrosecond;
    ranks[0].events.push_back({SpanKind::transfer, "put", point(at), point(end), -1, 1});
    ranks[1].events.push_back({SpanKind::wait, "recv", point(clock.at(at)),
                               point(clock.at(end + 1000 * kMicrosecond)), -1, 0});
  }
  EXPECT_TRUE(arrows(ranks).empty());  // the clocks are apart
  align_events(ranks[1].events, first, last);
  const auto found = arrows(ranks);
  ASSERT_EQ(found.size(), ranks[0].events.size());
  const std::chrono::nanoseconds bound(std::max(first.bound, last.bound) + 10);
  for (const Arrow& arrow : found) {
    EXPECT_EQ(arrow.transfer, arrow.wait);
    EXPECT_GE(ranks[1].events[arrow.wait].end + bound, ranks[0].events[arrow.transfer].end);
  }
}

}  // namespace
}  // namespace tandem
