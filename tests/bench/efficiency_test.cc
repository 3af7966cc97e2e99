#include "bench/efficiency.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tandem/random.h"

namespace tandem {
namespace {

// Times on a machine whose speed drifts by far more than the calls differ; all calls of a round are
// slowed equally.
RoundTimes drifting(int count) {
  RoundTimes rounds;
  for (int i = 0; i < count; ++i) {
    const double drift = 50.0 * i;
    rounds.gemm.push_back(100 + drift);
    rounds.serial.push_back(140 + drift);
    rounds.overlapped.push_back(110 + drift);
  }
  return rounds;
}

// Times with independent noise per call.
RoundTimes noisy(int count, uint64_t seed, float deviation) {
  RoundTimes rounds;
  for (int i = 0; i < count; ++i) {
    const auto time = [&](double us, uint64_t which) {
      return us + double(deviation * normal(seed, which, uint64_t(i)));
    };
    rounds.gemm.push_back(time(100, 0));
    rounds.serial.push_back(time(140, 1));
    rounds.overlapped.push_back(time(110, 2));
  }
  return rounds;
}

TEST(Efficiency, DriftDoesNotBlurDifferences) {
  for (const int count : {1, 2, 7, 15}) {
    const RoundTimes rounds = drifting(count);
    const auto range = efficiency_range(rounds, EctOf::differences);
    EXPECT_DOUBLE_EQ(exposed(rounds, EctOf::differences).efficiency(), 0.75);
    ASSERT_EQ(range.has_value(), count >= 5);
    if (!range) continue;
    EXPECT_DOUBLE_EQ(range->low, 0.75);
    EXPECT_DOUBLE_EQ(range->high, 0.75);
  }
}

TEST(Efficiency, MedianBasedExposureIsTheDifferenceOfMedians) {
  const RoundTimes rounds{{100, 300, 200}, {250, 150, 240}, {210, 220, 100}};
  EXPECT_DOUBLE_EQ(exposed(rounds, EctOf::medians).serial_us, 40);
  EXPECT_DOUBLE_EQ(exposed(rounds, EctOf::medians).overlapped_us, 10);
  EXPECT_DOUBLE_EQ(exposed(rounds, EctOf::medians).efficiency(), 0.75);
  EXPECT_DOUBLE_EQ(exposed(rounds, EctOf::differences).serial_us, 40);
  EXPECT_DOUBLE_EQ(exposed(rounds, EctOf::differences).overlapped_us, -80);
}

// About 95 of 100 ranges contain the true E, for either definition of ECT.
TEST(Efficiency, RangeContainsTheTrueEfficiency) {
  for (const EctOf how : {EctOf::differences, EctOf::medians}) {
    int holds = 0;
    double width = 0;
    for (uint64_t seed = 0; seed < 200; ++seed) {
      const EfficiencyRange range = *efficiency_range(noisy(15, seed, 2), how);
      EXPECT_LT(range.low, range.high);
      holds += range.low <= 0.75 && 0.75 <= range.high;
      width += (range.high - range.low) / 200;
    }
    EXPECT_GE(holds, 176);  // 88 %: 15 rounds are few
    EXPECT_GT(width, 0.02);
    EXPECT_LT(width, 0.2);
  }
}

TEST(Efficiency, RangeWidthIsProportionalToTheNoise) {
  const auto width = [](float deviation) {
    const EfficiencyRange range = *efficiency_range(noisy(15, 3, deviation), EctOf::medians);
    return range.high - range.low;
  };
  EXPECT_NEAR(width(4) / width(1), 4, 1);
}

TEST(Efficiency, IsNotShownIfSerialExposesNothing) {
  RoundTimes rounds = noisy(15, 1, 2);
  rounds.serial = rounds.gemm;
  EXPECT_EQ(exposed(rounds, EctOf::medians).efficiency(), -INFINITY);
  EXPECT_FALSE(efficiency_range(rounds, EctOf::medians)->is_narrow());
}

// If serial exposes hardly anything, hardly any range is narrow enough to be shown.
TEST(Efficiency, IsNotShownIfSerialExposesOnlyNoise) {
  int narrow = 0;
  for (uint64_t seed = 0; seed < 100; ++seed) {
    RoundTimes rounds = noisy(15, seed, 2);
    for (double& us : rounds.serial) us -= 39;
    narrow += efficiency_range(rounds, EctOf::differences)->is_narrow();
  }
  EXPECT_LE(narrow, 10);
}

// Ranges narrow with the number of rounds, although many rounds get fewer bootstrap draws.
TEST(Efficiency, RangeNarrowsWithMoreRounds) {
  const auto width = [](int count) {
    const EfficiencyRange range = *efficiency_range(noisy(count, 7, 2), EctOf::medians);
    return range.high - range.low;
  };
  EXPECT_NEAR(width(15) / width(1500), 10, 4);
}

}  // namespace
}  // namespace tandem
