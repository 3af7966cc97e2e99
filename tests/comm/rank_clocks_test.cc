#include "comm/rank_clocks.h"

#include <gtest/gtest.h>

#include <cstdlib>

namespace tandem {
namespace {

constexpr int64_t kSecond = 1'000'000'000;

// Offset of a rank's clock in these tests: seconds apart, before and after rank 0's.
int64_t shift_of(int rank) {
  return (rank % 2 ? -7 : 3) * kSecond * rank;
}

TEST(RankClocks, EveryRankFindsAllShiftsWithinTheBounds) {
  WorldOptions options;
  options.ranks = 5;
  run_threads(options, [](Communicator& world) {
    const auto clocks = rank_clocks(world, [&] { return clock_ns() + shift_of(world.rank()); });
    ASSERT_EQ(clocks.size(), 5u);
    EXPECT_EQ(clocks[0].offset, 0);
    EXPECT_EQ(clocks[0].bound, 0);
    for (int rank = 1; rank < 5; ++rank) {
      const ClockOffset& clock = clocks[size_t(rank)];
      EXPECT_LE(std::abs(clock.offset - shift_of(rank)), clock.bound) << rank;
      EXPECT_GT(clock.bound, 0);
    }
  });
}

TEST(RankClocks, RanksOfOneHostShareAClock) {
  WorldOptions options;
  options.ranks = 3;
  run_threads(options, [](Communicator& world) {
    for (const ClockOffset& clock : rank_clocks(world)) EXPECT_EQ(clock.offset, 0);
  });
}

}  // namespace
}  // namespace tandem
