// What only thread-ranks show in one process: how a world ends.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "tandem/communicator.h"

namespace tandem {
namespace {

using testing::HasSubstr;
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

WorldOptions options_of(int ranks, double deadline_s = 30) {
  WorldOptions options;
  options.ranks = ranks;
  options.deadline_s = deadline_s;
  return options;
}

TEST(RunThreads, RefusesNoRanks) {
  try {
    run_threads(options_of(0), [](Communicator&) {});
    FAIL();
  } catch (const InvalidArgument& error) {
    EXPECT_THAT(error.what(), HasSubstr("ranks 0"));
  }
}

TEST(RunThreads, RethrowsTheOriginalError) {
  const auto begin = Clock::now();
  std::atomic<int> aborted{0};
  try {
    run_threads(options_of(4), [&](Communicator& comm) {
      const auto pair = comm.split(comm.rank() / 2, 0);
      const auto buffer = pair->allocate(8, 1);
      if (comm.rank() == 2) throw IoError("no such file: wheel");
      try {
        pair->wait(*buffer, 0, 1, {"test"});
      } catch (const Aborted& error) {
        EXPECT_EQ(error.origin, 2);
        EXPECT_THAT(error.what(), HasSubstr("no such file: wheel"));
        ++aborted;
        throw;
      }
    });
    FAIL();
  } catch (const IoError& error) {
    EXPECT_STREQ(error.what(), "no such file: wheel");
  }
  EXPECT_EQ(aborted, 3);
  EXPECT_LT(seconds_since(begin), 5);
}

TEST(RunThreads, AbortFromAnyThreadReachesAllWaiters) {
  const auto begin = Clock::now();
  std::atomic<int> aborted{0};
  EXPECT_THROW(run_threads(options_of(8),
                           [&](Communicator& comm) {
                             const auto third = comm.split(comm.rank() % 3, 0);
                             const auto buffer = third->allocate(8, 1);
                             std::jthread breaker;
                             if (comm.rank() == 5) {
                               breaker = std::jthread([&] {
                                 std::this_thread::sleep_for(std::chrono::milliseconds(50));
                                 comm.abort("enough");
                               });
                             }
                             EXPECT_THROW(third->wait(*buffer, 0, 1, {"test"}), Aborted);
                             EXPECT_THROW(comm.barrier(), Aborted);
                             ++aborted;
                             comm.barrier();
                           }),
               Aborted);
  EXPECT_EQ(aborted, 8);
  EXPECT_LT(seconds_since(begin), 5);
}

TEST(RunThreads, ARankThatNeverArrivesIsNamed) {
  for (const int missing : {0, 2}) {
    std::atomic<int> timeouts{0};
    const auto begin = Clock::now();
    try {
      run_threads(options_of(4, 0.3), [&](Communicator& comm) {
        if (comm.rank() == missing) {
          std::this_thread::sleep_for(std::chrono::milliseconds(800));
          return;
        }
        try {
          comm.barrier("step 3");
        } catch (const Timeout& error) {
          EXPECT_EQ(error.op, "step 3");
          EXPECT_EQ(error.peer, missing);
          EXPECT_EQ(error.rank, comm.rank());
          ++timeouts;
          std::this_thread::sleep_for(std::chrono::milliseconds(100));
          throw;
        }
      });
      FAIL();
    } catch (const Timeout& error) {
      EXPECT_EQ(error.peer, missing);
    }
    EXPECT_EQ(timeouts, 3);
    EXPECT_LT(seconds_since(begin), 3);
  }
}

TEST(RunThreads, MoreRanksThanCores) {
  const auto begin = Clock::now();
  run_threads(options_of(16), [](Communicator& comm) {
    for (int i = 0; i < 100; ++i) comm.barrier();
  });
  EXPECT_LT(seconds_since(begin), 15);
}

TEST(EmulatedLink, ParsesAndDescribes) {
  EXPECT_EQ(EmulatedLink::parse("1GB/s,20us").describe(), "emulated 1 GB/s 20 us");
  EXPECT_EQ(EmulatedLink::parse("1Gbit/s, 0.5 ms").describe(), "emulated 125 MB/s 500 us");
  EXPECT_DOUBLE_EQ(EmulatedLink::parse("250kB/s,1s").bytes_per_s, 250e3);
  EXPECT_DOUBLE_EQ(EmulatedLink::parse("8 Mbit/s,0us").bytes_per_s, 1e6);
  for (const char* wrong : {"", "1GB/s", "fast,20us", "1GB,20us", "0GB/s,20us", "1GB/s,20",
                            "-1GB/s,20us", "1GB/s,-1us", "1GB/s,20us,3", "infGB/s,1us"}) {
    try {
      EmulatedLink::parse(wrong);
      FAIL() << wrong;
    } catch (const InvalidArgument& error) {
      EXPECT_THAT(error.what(), HasSubstr("link '" + std::string(wrong) + "': expected RATE"));
    }
  }
}

}  // namespace
}  // namespace tandem
