// Times at which memory that peers may still write to is freed, and reports of failed allocations.
#include "comm/agreement.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace tandem::test {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

std::vector<std::byte> blob_of(const std::vector<uint64_t>& numbers) {
  const auto bytes = std::as_bytes(std::span(numbers));
  return {bytes.begin(), bytes.end()};
}
std::vector<std::byte> blob_of(const std::string& text) {
  const auto bytes = std::as_bytes(std::span(text.data(), text.size()));
  return {bytes.begin(), bytes.end()};
}

TEST(Agreement, NamesTheFirstRankThatFailed) {
  EXPECT_EQ(first_failure({blob_of(""), blob_of("")}), "");
  EXPECT_EQ(first_failure({blob_of(""), blob_of("no memory"), blob_of("none either")}),
            "rank 1: no memory");
}

TEST(Agreement, CommonNumbersAreThoseThatAllRanksHave) {
  using Numbers = std::vector<uint64_t>;
  EXPECT_THAT(in_all({}), IsEmpty());
  EXPECT_THAT(in_all({blob_of(Numbers{1, 4, 9})}), ElementsAre(1, 4, 9));
  EXPECT_THAT(in_all({blob_of(Numbers{1, 4, 9}), blob_of(Numbers{0, 4, 7, 9})}), ElementsAre(4, 9));
  EXPECT_THAT(in_all({blob_of(Numbers{1, 4, 9}), blob_of(Numbers{})}), IsEmpty());
}

// As in a transport: each rank drops its buffers in its own order, and frees at its next
// allocations those that all ranks have dropped.
TEST(Agreement, NothingIsFreedBeforeAllRanksHaveDroppedIt) {
  constexpr int kRanks = 4, kAllocations = 60;
  std::vector<std::atomic<int>> dropped_by(kAllocations);
  std::vector<std::vector<int>> freed_by(kRanks);
  run_threads({kRanks, {}, 30}, [&](Communicator& comm) {
    std::mt19937 draw(unsigned(comm.rank() + 1));
    Retired<int> retired;
    std::vector<int>& freed = freed_by[size_t(comm.rank())];
    std::vector<int> owned;
    const auto free_some = [&] {
      const std::vector<uint64_t> local = retired.numbers();
      const Blobs exchanged = comm.exchange(std::as_bytes(std::span(local)), "free");
      for (const int number : retired.take(exchanged)) {
        EXPECT_EQ(dropped_by[size_t(number)], kRanks) << number;
        freed.push_back(number);
      }
    };
    for (int i = 0; i < kAllocations; ++i) {
      free_some();
      const auto number = int(retired.issue());
      EXPECT_EQ(number, i);
      owned.push_back(number);
      while (!owned.empty() && draw() % 3 != 0) {
        const auto which = owned.begin() + long(draw() % owned.size());
        ++dropped_by[size_t(*which)];
        retired.add(uint64_t(*which), *which);
        owned.erase(which);
      }
    }
    for (const int number : owned) {
      ++dropped_by[size_t(number)];
      retired.add(uint64_t(number), number);
    }
    free_some();
    EXPECT_THAT(retired.take_all(), IsEmpty());
    EXPECT_EQ(std::set<int>(freed.begin(), freed.end()).size(), size_t(kAllocations));
  });
  for (const auto& freed : freed_by) EXPECT_EQ(freed, freed_by.front());
}

TEST(Agreement, AnyThreadMayDropABuffer) {
  constexpr uint64_t kEach = 20000;
  using Numbers = std::vector<uint64_t>;
  Retired<int> retired;
  {
    std::vector<std::jthread> threads;
    for (uint64_t thread = 0; thread < 4; ++thread) {
      threads.emplace_back([&retired, thread] {
        for (uint64_t i = 0; i < kEach; ++i) retired.add(4 * i + thread, int(i));
      });
    }
    for (int i = 0; i < 100; ++i) {
      const Numbers some = retired.numbers();
      EXPECT_TRUE(std::ranges::is_sorted(some));
    }
  }
  EXPECT_EQ(retired.take_all().size(), 4 * kEach);
}

TEST(Agreement, TakeAllReturnsEverything) {
  Retired<std::unique_ptr<int>> retired;
  for (int i = 0; i < 3; ++i) retired.add(retired.issue(), std::make_unique<int>(i));
  EXPECT_EQ(retired.take_all().size(), 3u);
  EXPECT_THAT(retired.numbers(), IsEmpty());
}

}  // namespace
}  // namespace tandem::test
