// The emulated link takes the time it says, beside the thread that sends.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <vector>

#include "observe/recorder.h"
#include "tandem/collectives.h"

namespace tandem {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

void on_link(int ranks, const char* link, const std::function<void(Communicator&)>& body) {
  WorldOptions options;
  options.ranks = ranks;
  options.link = EmulatedLink::parse(link);
  options.deadline_s = 30;
  run_threads(options, body);
}

// A transfer never ends early. The fastest of some tries shows the schedule; slower ones show a
// busy machine.
void expect_about(const std::vector<double>& seconds, double expected) {
  const double fastest = *std::min_element(seconds.begin(), seconds.end());
  EXPECT_GE(fastest, expected);
  EXPECT_LT(fastest, expected * 1.1 + 0.002);
}

// Both ranks read one clock: from just before the put on rank 0 to the signal on rank 1.
TEST(Link, TransferTakesBytesOverBandwidthPlusLatency) {
  for (const size_t bytes : {size_t(0), size_t(100000), size_t(3000000)}) {
    std::vector<double> seconds;
    Clock::time_point begin;
    on_link(2, "100MB/s,2ms", [&](Communicator& comm) {
      EXPECT_EQ(comm.link(), "emulated 100 MB/s 2 ms");
      const auto buffer = comm.allocate(bytes, 1);
      EXPECT_EQ(buffer->peer(1 - comm.rank()), nullptr);
      const std::vector<std::byte> source(bytes);
      for (uint64_t epoch = 1; epoch <= 5; ++epoch) {
        comm.barrier();
        if (comm.rank() == 0) {
          begin = Clock::now();
          comm.put(1, *buffer, 0, source.data(), bytes, 0, epoch);
          comm.flush();
        } else {
          comm.wait(*buffer, 0, epoch, {"test", 0});
          seconds.push_back(seconds_since(begin));
        }
      }
    });
    expect_about(seconds, double(bytes) / 100e6 + 0.002);
  }
}

// Ten messages pay the latency once: it overlaps with the next one's bytes.
TEST(Link, MessagesPipeline) {
  std::vector<double> seconds;
  Clock::time_point begin;
  on_link(2, "100MB/s,20ms", [&](Communicator& comm) {
    constexpr size_t kBytes = 200000;
    const auto buffer = comm.allocate(10 * kBytes, 1);
    const std::vector<std::byte> source(kBytes);
    for (uint64_t round = 0; round < 3; ++round) {
      comm.barrier();
      if (comm.rank() == 1) {
        comm.wait(*buffer, 0, 10 * round + 10, {"test", 0});
        seconds.push_back(seconds_since(begin));
        continue;
      }
      begin = Clock::now();
      for (uint64_t i = 1; i <= 10; ++i) {
        comm.put(1, *buffer, (i - 1) * kBytes, source.data(), kBytes, 0, 10 * round + i);
      }
      comm.flush();
    }
  });
  expect_about(seconds, 10 * 200000 / 100e6 + 0.020);
}

// One rank's transfers to different peers share its link.
TEST(Link, PeersShareOneLink) {
  std::vector<double> seconds(4);
  on_link(4, "100MB/s,1ms", [&](Communicator& comm) {
    constexpr size_t kBytes = 1000000;
    const auto buffer = comm.allocate(kBytes, 1);
    const std::vector<std::byte> source(kBytes);
    comm.barrier();
    const auto begin = Clock::now();
    if (comm.rank() == 0) {
      for (int peer = 1; peer < 4; ++peer) {
        comm.put(peer, *buffer, 0, source.data(), kBytes, 0, 1);
      }
      comm.flush();
    } else {
      comm.wait(*buffer, 0, 1, {"test", 0});
    }
    seconds[size_t(comm.rank())] = seconds_since(begin);
  });
  EXPECT_GE(seconds[0], 0.029);  // flush: the last byte left; begin may trail the barrier
  for (size_t r = 1; r < 4; ++r) EXPECT_GE(seconds[r], 0.010 * double(r) - 0.001);
}

// The sender computes while its bytes travel: putting costs it nearly nothing, and both together
// take as long as the longer.
TEST(Link, TransfersRunBesideComputation) {
  double best = 1e9, best_put = 1e9;
  Clock::time_point begin;
  on_link(2, "200MB/s,1ms", [&](Communicator& comm) {
    constexpr size_t kBytes = 10'000'000;  // 50 ms
    const auto buffer = comm.allocate(kBytes, 1);
    const std::vector<std::byte> source(kBytes);
    for (uint64_t epoch = 1; epoch <= 4; ++epoch) {
      comm.barrier();
      const auto start = Clock::now();
      if (comm.rank() == 0) {
        begin = start;
        comm.put(1, *buffer, 0, source.data(), kBytes, 0, epoch);
        best_put = std::min(best_put, seconds_since(start));
      }
      volatile double work = 0;
      while (seconds_since(start) < 0.050) work = work + 1;
      if (comm.rank() == 1) {
        comm.wait(*buffer, 0, epoch, {"test", 0});
        best = std::min(best, seconds_since(begin));
      }
      comm.flush();
    }
  });
  EXPECT_LT(best_put, 0.001);
  EXPECT_GE(best, 0.051);
  EXPECT_LT(best, 0.060);
}

TEST(Link, RecordsTimeOnTheWire) {
  on_link(2, "100MB/s,5ms", [&](Communicator& comm) {
    recorder().set_tracing(true);
    recorder().take_events();
    recorder().reset();
    const auto buffer = comm.allocate(1000000, 1);
    recorder().reset();
    recorder().take_events();
    const std::vector<std::byte> source(1000000);
    comm.put(1 - comm.rank(), *buffer, 0, source.data(), 1000000, 0, 1);
    comm.put(comm.rank(), *buffer, 0, source.data(), 0, 0, 1);
    EXPECT_NEAR(recorder().seconds(SpanKind::transfer), 0.010, 1e-6);
    const auto events = recorder().take_events();
    ASSERT_EQ(events.size(), 1u);
    EXPECT_EQ(events[0].peer, 1 - comm.rank());
    comm.flush();
    EXPECT_GE(Clock::now(), events[0].end);
  });
}

// What is still on the way when a body ends arrives all the same.
TEST(Link, LastTransfersArrive) {
  std::atomic<int> arrived{0};
  on_link(2, "100MB/s,30ms", [&](Communicator& comm) {
    const auto buffer = comm.allocate(8, 1);
    if (comm.rank() == 0) {
      comm.put(1, *buffer, 0, nullptr, 0, 0, 1);
    } else {
      comm.wait(*buffer, 0, 1, {"test", 0});
      ++arrived;
    }
  });
  EXPECT_EQ(arrived, 1);
}

TEST(Link, AbortDoesNotWaitForTheWire) {
  const auto begin = Clock::now();
  EXPECT_THROW(on_link(2, "1MB/s,1ms",
                       [](Communicator& comm) {
                         const auto buffer = comm.allocate(20'000'000, 1);
                         const std::vector<std::byte> source(20'000'000);  // 20 s
                         comm.put(1 - comm.rank(), *buffer, 0, source.data(), source.size(), 0, 1);
                         if (comm.rank() == 0) {
                           comm.flush();
                         } else {
                           comm.abort("changed my mind");
                         }
                         comm.wait(*buffer, 0, 1, {"test"});
                       }),
               Aborted);
  EXPECT_LT(seconds_since(begin), 3);
}

// An all-reduce of N bytes over two ranks puts N bytes on each link.
TEST(Link, AllReduceTakesItsWireTime) {
  std::vector<double> seconds;
  on_link(2, "200MB/s,50us", [&](Communicator& comm) {
    std::vector<float> data(1 << 20);
    for (int i = 0; i < 4; ++i) {
      comm.barrier();
      const auto begin = Clock::now();
      all_reduce(comm, Tensor(data.data(), DType::f32, {1 << 20}));
      if (comm.rank() == 0) seconds.push_back(seconds_since(begin));
    }
  });
  const double fastest = *std::min_element(seconds.begin(), seconds.end());
  const double wire = double(4 << 20) / 200e6;
  EXPECT_GE(fastest, wire * 0.95);
  EXPECT_LT(fastest, wire * 1.3);
}

}  // namespace
}  // namespace tandem
