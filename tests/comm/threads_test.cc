// Behaviour specific to thread-ranks: how a world ends.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tandem/codec.h"
#include "tandem/collectives.h"
#include "tandem/random.h"

namespace tandem {
namespace {

using testing::HasSubstr;
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// Shorter than a wait that is never ended, and longer than an ended one on a busy machine.
constexpr double kSoon = 60;

WorldOptions options_of(int ranks, double deadline_s = 600) {
  WorldOptions options;
  options.ranks = ranks;
  options.deadline_s = deadline_s;
  return options;
}

TEST(RunThreads, RefusesZeroRanks) {
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
      try {
        const auto pair = comm.split(comm.rank() / 2, 0);
        const auto buffer = pair->allocate(8, 1);
        if (comm.rank() == 2) throw IoError("no such file: wheel");
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
  EXPECT_LT(seconds_since(begin), kSoon);
}

// Ends waits on the world and on groups split from it; a wait that begins after the abort ends too.
TEST(RunThreads, AbortFromAnyThreadReachesAllWaiters) {
  const auto begin = Clock::now();
  std::atomic<int> ready{0}, aborted{0};
  EXPECT_THROW(run_threads(options_of(8),
                           [&](Communicator& comm) {
                             const auto third = comm.split(comm.rank() % 3, 0);
                             const auto buffer = third->allocate(8, 1);
                             std::jthread breaker;
                             ++ready;
                             if (comm.rank() == 5) {
                               breaker = std::jthread([&] {
                                 while (ready < 8) std::this_thread::yield();
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
  EXPECT_LT(seconds_since(begin), kSoon);
}

TEST(RunThreads, MissingRankIsNamed) {
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
    EXPECT_LT(seconds_since(begin), kSoon);
  }
}

// Every collective that needs the missing rank names it and the operation.
TEST(RunThreads, CollectivesNameTheMissingRank) {
  const std::vector<int64_t> counts(3, 1);
  const std::vector<std::pair<std::string, std::function<void(Communicator&, const Tensor&)>>> ops{
      {"all_reduce", [](Communicator& comm, const Tensor& t) { all_reduce(comm, t); }},
      {"broadcast", [](Communicator& comm, const Tensor& t) { broadcast(comm, t, 0); }},
      {"all_gather",
       [](Communicator& comm, const Tensor& t) { all_gather(comm, t.rows(0, 1), t.rows(0, 3)); }},
      {"reduce_scatter", [](Communicator& comm,
                            const Tensor& t) { reduce_scatter(comm, t.rows(0, 3), t.rows(0, 1)); }},
      {"all_to_all",
       [&](Communicator& comm, const Tensor& t) {
         all_to_all(comm, t.rows(0, 3), counts, t.rows(3, 3), counts);
       }},
      {"recv", [](Communicator& comm, const Tensor& t) { recv(comm, t, 1); }},
  };
  for (const auto& [name, call] : ops) {
    std::atomic<bool> over{false};
    try {
      run_threads(options_of(3), [&, &call = call](Communicator& comm) {
        if (comm.rank() == 1) {
          while (!over) std::this_thread::sleep_for(std::chrono::milliseconds(5));
          return;
        }
        if (comm.rank() == 2) return;
        try {
          comm.set_deadline(0.2);
          float values[8] = {};
          call(comm, Tensor(values, DType::f32, {8}));
        } catch (const Timeout&) {
          over = true;
          throw;
        }
      });
      ADD_FAILURE() << name;
    } catch (const Timeout& error) {
      EXPECT_EQ(error.op, name);
      EXPECT_EQ(error.rank, 0);
      EXPECT_EQ(error.peer, 1);
    }
  }
}

// Peers access a rank's tensor in place; a rank that leaves early may free it at once (the address
// sanitizer detects a peer that still accesses it).
TEST(RunThreads, CallReturnsOnlyWhenPeersNoLongerUseItsTensor) {
  constexpr int64_t kRows = 3 * 20000;
  for (uint64_t round = 0; round < 20; ++round) {
    EXPECT_THROW(run_threads(options_of(3),
                             [&](Communicator& comm) {
                               std::jthread aborter;
                               if (comm.rank() == 0) {
                                 aborter = std::jthread([&] {
                                   const auto wait = 200 + philox(3, 0, round)[0] % 5000;
                                   std::this_thread::sleep_for(std::chrono::microseconds(wait));
                                   comm.abort("enough");
                                 });
                               }
                               while (true) {
                                 const Memory memory(kRows * sizeof(float)),
                                     shard_memory(kRows / 3 * sizeof(float));
                                 const Tensor whole = memory.view(DType::f32, {kRows});
                                 const Tensor shard = shard_memory.view(DType::f32, {kRows / 3});
                                 all_reduce(comm, whole);
                                 all_gather(comm, shard, whole);
                                 reduce_scatter(comm, whole, shard);
                                 broadcast(comm, whole, 1);
                               }
                             }),
                 Aborted);
  }
}

// A rank that arrives after the others have timed out accesses no memory of theirs.
TEST(RunThreads, LateRankTouchesNothing) {
  std::atomic<int> timeouts{0};
  EXPECT_THROW(run_threads(options_of(3),
                           [&](Communicator& comm) {
                             comm.barrier();
                             comm.set_deadline(0.1);
                             if (comm.rank() == 2) {
                               while (timeouts < 2) {
                                 std::this_thread::sleep_for(std::chrono::milliseconds(5));
                               }
                             }
                             {
                               const Memory memory(1 << 20);
                               const Tensor data = memory.view(DType::f32, {1 << 18});
                               try {
                                 all_reduce(comm, data);
                               } catch (const Timeout& error) {
                                 EXPECT_EQ(error.peer, 2);
                                 ++timeouts;
                               }
                             }
                             std::this_thread::sleep_for(std::chrono::milliseconds(200));
                           }),
               Aborted);
  EXPECT_EQ(timeouts, 2);
}

// The late rank gets memory that the others used: they have left, so this is no error of its
// caller.
TEST(RunThreads, MemoryFreedByRanksThatLeftIsNoSharedArray) {
  for (const auto& link : {std::optional<EmulatedLink>(), std::optional(EmulatedLink{1e9, 1e-6})}) {
    for (const char* wire : {"none", "int8"}) {
      for (const int64_t rows : {12, 24000}) {
        Memory memory(size_t(rows) * 4);
        std::atomic<int> timeouts{0};
        std::string late;
        EXPECT_THROW(run_threads({3, link},
                                 [&](Communicator& comm) {
                                   Memory local(comm.rank() == 1 ? size_t(rows) * 4 : 0);
                                   const Memory& used = comm.rank() == 1 ? local : memory;
                                   const Tensor data = used.view(DType::f32, {rows});
                                   comm.barrier();
                                   comm.set_deadline(0.1);
                                   while (comm.rank() == 2 && timeouts < 2) {
                                     std::this_thread::sleep_for(std::chrono::milliseconds(5));
                                   }
                                   try {
                                     all_reduce(comm, data, Wire::parse(wire));
                                   } catch (const Timeout&) {
                                     ++timeouts;
                                   } catch (const Error& error) {
                                     late = error.what();
                                     throw;
                                   }
                                 }),
                     Aborted);
        EXPECT_EQ(late, "aborted by rank 0: all_reduce: it has left the call");
      }
    }
  }
}

TEST(RunThreads, MoreRanksThanCoresWork) {
  run_threads(options_of(16), [](Communicator& comm) {
    for (int i = 0; i < 100; ++i) comm.barrier();
  });
}

TEST(EmulatedLink, ParsesAndDescribes) {
  EXPECT_EQ(EmulatedLink::parse("1GB/s,20us").describe(), "emulated 1 GB/s 20 us");
  EXPECT_EQ(EmulatedLink::parse("1Gbit/s, 0.5 ms").describe(), "emulated 125 MB/s 500 us");
  EXPECT_DOUBLE_EQ(EmulatedLink::parse("250kB/s,1s").bytes_per_s, 250e3);
  EXPECT_DOUBLE_EQ(EmulatedLink::parse("8 Mbit/s,0us").bytes_per_s, 1e6);
  for (const char* wrong : {"", "1GB/s", "fast,20us", "1GB,20us", "1GB/s,20", "-1GB/s,20us",
                            "1GB/s,-1us", "1GB/s,20us,3", "infGB/s,1us"}) {
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
