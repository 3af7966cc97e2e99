// The emulated link takes the configured time, concurrently with the sending thread.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include "comm/link_fault.h"
#include "comm/workspace.h"
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

// A transfer never ends early. The fastest of several tries shows the schedule, slower ones a busy
// machine: the first fast enough ends the tries. Overhead of sanitizers is ignored.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr double kSlack = 1;
#else
constexpr double kSlack = 0.002;
#endif
constexpr int kTries = 40;

void expect_about(double expected, const std::function<std::vector<double>()>& measure) {
  double fastest = 1e9;
  for (int i = 0; i < kTries && fastest > expected * 1.1 + kSlack; ++i) {
    for (const double seconds : measure()) {
      EXPECT_GE(seconds, expected);
      fastest = std::min(fastest, seconds);
    }
  }
  EXPECT_LE(fastest, expected * 1.1 + kSlack);
}

// Both ranks read one clock: from just before the put on rank 0 to the signal on rank 1.
TEST(Link, TransferTakesBytesOverBandwidthPlusLatency) {
  for (const size_t bytes : {size_t(0), size_t(100000), size_t(3000000)}) {
    expect_about(double(bytes) / 100e6 + 0.002, [&] {
      std::vector<double> seconds;
      Clock::time_point begin;
      on_link(2, "100MB/s,2ms", [&](Communicator& comm) {
        EXPECT_EQ(comm.link(), "emulated 100 MB/s 2 ms");
        const auto buffer = comm.allocate(bytes, 1);
        EXPECT_EQ(buffer->peer(1 - comm.rank()), nullptr);
        const std::vector<std::byte> source(bytes);
        if (comm.rank() == 0) {
          begin = Clock::now();
          comm.put(1, *buffer, 0, source.data(), bytes, 0, 1);
          comm.flush();
        } else {
          comm.wait(*buffer, 0, 1, {"test", 0});
          seconds.push_back(seconds_since(begin));
        }
      });
      return seconds;
    });
  }
}

// Ten messages pay the latency once: it overlaps with the next message's bytes.
TEST(Link, MessagesOverlapTheirLatencies) {
  constexpr size_t kBytes = 200000;
  expect_about(10 * kBytes / 100e6 + 0.020, [] {
    std::vector<double> seconds;
    Clock::time_point begin;
    on_link(2, "100MB/s,20ms", [&](Communicator& comm) {
      const auto buffer = comm.allocate(10 * kBytes, 1);
      const std::vector<std::byte> source(kBytes);
      if (comm.rank() == 1) {
        comm.wait(*buffer, 0, 10, {"test", 0});
        seconds.push_back(seconds_since(begin));
        return;
      }
      begin = Clock::now();
      for (uint64_t i = 1; i <= 10; ++i) {
        comm.put(1, *buffer, (i - 1) * kBytes, source.data(), kBytes, 0, i);
      }
      comm.flush();
    });
    return seconds;
  });
}

// A fault slows down one of two connections of a rank; the other one's messages do not wait for it.
TEST(Link, ASlowConnectionDelaysOnlyItsPeer) {
  constexpr size_t kBytes = 100000;
  constexpr double kUsual = kBytes / 100e6 + 0.002, kFactor = 50;
  std::vector<double> slow;
  expect_about(2 * kBytes / 100e6 + 0.002, [&] {
    std::vector<double> seconds;
    Clock::time_point begin;
    on_link(3, "100MB/s,2ms", [&](Communicator& comm) {
      const auto buffer = comm.allocate(kBytes, 1);
      const std::vector<std::byte> source(kBytes);
      if (comm.rank() == 0) {
        slow_link(1, kFactor);
        begin = Clock::now();
        comm.put(1, *buffer, 0, source.data(), kBytes, 0, 1);
        comm.put(2, *buffer, 0, source.data(), kBytes, 0, 1);
        comm.flush();
        slow_link(-1, 1);
      } else {
        comm.wait(*buffer, 0, 1, {"test", 0});
        (comm.rank() == 1 ? slow : seconds).push_back(seconds_since(begin));
      }
    });
    return seconds;
  });
  for (const double seconds : slow) EXPECT_GE(seconds, kFactor * kUsual);
}

// One rank's transfers to different peers share its link.
TEST(Link, PeersShareOneLink) {
  std::vector<double> seconds(4);
  Clock::time_point begin;
  on_link(4, "100MB/s,1ms", [&](Communicator& comm) {
    constexpr size_t kBytes = 1000000;
    const auto buffer = comm.allocate(kBytes, 1);
    const std::vector<std::byte> source(kBytes);
    if (comm.rank() == 0) {
      begin = Clock::now();
      for (int peer = 1; peer < 4; ++peer) {
        comm.put(peer, *buffer, 0, source.data(), kBytes, 0, 1);
      }
      comm.flush();
    } else {
      comm.wait(*buffer, 0, 1, {"test", 0});
    }
    seconds[size_t(comm.rank())] = seconds_since(begin);
  });
  EXPECT_GE(seconds[0], 0.030);  // flush: the last byte was sent
  for (size_t r = 1; r < 4; ++r) EXPECT_GE(seconds[r], 0.010 * double(r) + 0.001);
}

// The sender computes while its bytes are in flight: both together take as long as the longer, and
// the put takes a copy's time, less than half of the wire time.
TEST(Link, TransfersOverlapWithComputation) {
  double fastest_put = 1e9;
  expect_about(0.051, [&] {
    std::vector<double> seconds;
    Clock::time_point begin;
    on_link(2, "200MB/s,1ms", [&](Communicator& comm) {
      constexpr size_t kBytes = 10'000'000;  // 50 ms
      const auto buffer = comm.allocate(kBytes, 1);
      const std::vector<std::byte> source(kBytes);
      comm.barrier();
      const auto start = Clock::now();
      if (comm.rank() == 0) {
        begin = start;
        comm.put(1, *buffer, 0, source.data(), kBytes, 0, 1);
        fastest_put = std::min(fastest_put, seconds_since(start));
      }
      volatile double work = 0;
      while (seconds_since(start) < 0.045) work = work + 1;
      if (comm.rank() == 1) {
        comm.wait(*buffer, 0, 1, {"test", 0});
        seconds.push_back(seconds_since(begin));
      }
      comm.flush();
    });
    return seconds;
  });
  EXPECT_LT(fastest_put, 0.025 + kSlack);
}

TEST(Link, RecordsWireTime) {
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

// Transfers still in flight when a body ends arrive nevertheless.
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

// The deadline applies to a slow link as to any other wait.
TEST(Link, SlowerThanTheDeadlineIsATimeout) {
  WorldOptions options;
  options.ranks = 2;
  options.link = EmulatedLink::parse("1kB/s,0s");
  const auto begin = Clock::now();
  const std::vector<std::byte> source(1'000'000);
  const auto flush = [&](Communicator& comm) {
    const auto buffer = comm.allocate(source.size(), 1);
    comm.set_deadline(0.2);
    comm.put(1 - comm.rank(), *buffer, 0, source.data(), source.size(), 0, 1);
    comm.flush();
  };
  EXPECT_THROW(run_threads(options, flush), Timeout);
  const auto drain = [&](Communicator& comm) {
    const auto buffer = comm.allocate(source.size(), 1);
    comm.set_deadline(0.2);
    comm.put(1 - comm.rank(), *buffer, 0, source.data(), source.size(), 0, 1);
  };
  EXPECT_THROW(run_threads(options, drain), Timeout);
  EXPECT_LT(seconds_since(begin), 60);
}

TEST(Link, UnrepresentableRatesAndLatenciesAreRefused) {
  const auto message = [](const char* text) -> std::string {
    try {
      EmulatedLink::parse(text);
    } catch (const InvalidArgument& error) {
      return error.what();
    }
    return "taken";
  };
  const auto has = [&](const char* text, const char* needle) {
    EXPECT_NE(message(text).find(needle), std::string::npos) << text << ": " << message(text);
  };
  has("1e-300B/s,1us", "link '1e-300B/s,1us': a rate of 1e-300 B/s: expected 1 to 1e+15 B/s");
  has("0B/s,1us", "a rate of 0 B/s: expected 1 to");
  has("1e308GB/s,1us", "a rate of inf B/s: expected 1 to");
  has("1GB/s,1e300s", "a latency of 1e+300 s: expected 0 to 3600 s");
  EXPECT_EQ(message("1B/s,3600s"), "taken");
  WorldOptions options;
  options.link = EmulatedLink{1e-300, 0};
  EXPECT_THROW(run_threads(options, [](Communicator&) {}), InvalidArgument);
}

// A long transfer delays the copying thread: memory that a communicator freed too early would be
// overwritten before it is read.
void keep_busy(Communicator& comm, SymmetricBuffer& buffer, const std::vector<std::byte>& source) {
  if (comm.rank() == 0) comm.put(1, buffer, 0, source.data(), source.size(), 0, 1);
}

TEST(Link, CommunicatorMayBeDestroyedBeforeItsTransfersEnd) {
  on_link(2, "100GB/s,1us", [&](Communicator& comm) {
    const std::vector<std::byte> source(size_t(32) << 20);
    const auto buffer = comm.allocate(source.size(), 1);
    for (int round = 0; round < 5; ++round) {
      auto group = comm.split(0, 0);
      keep_busy(comm, *buffer, source);
      const std::byte local_data{uint8_t(comm.rank() + 1)};
      const auto blobs = group->exchange({&local_data, 1}, "test");
      group.reset();
      const std::vector<std::byte> reused(2176, std::byte{0xff});
      EXPECT_EQ(blobs[0][0], std::byte{1}) << int(reused[0]);
      EXPECT_EQ(blobs[1][0], std::byte{2});
    }
    comm.flush();
  });
}

TEST(Link, CommunicatorMayOutliveItsWorld) {
  std::unique_ptr<Communicator> survivor;
  on_link(2, "1GB/s,1us", [&](Communicator& comm) {
    auto group = comm.split(0, 0);
    group->barrier();
    if (comm.rank() == 0) survivor = std::move(group);
  });
  survivor.reset();
}

// The disagreement is known while the first chunks are still in flight. The staging buffer shows
// whether they were read before the tensor changed.
TEST(Link, TensorsMayChangeAfterADisagreement) {
  on_link(2, "100GB/s,1us", [&](Communicator& comm) {
    const std::vector<std::byte> source(size_t(32) << 20);
    const auto buffer = comm.allocate(source.size(), 1);
    keep_busy(comm, *buffer, source);
    std::vector<float> data(size_t(1 << 20) + size_t(comm.rank()), 1.0f);
    EXPECT_THROW(all_reduce(comm, Tensor(data.data(), DType::f32, {int64_t(data.size())})),
                 Mismatch);
    std::fill(data.begin(), data.end(), 2.0f);
    comm.flush();
    comm.barrier();
    if (comm.rank() == 0) return;
    const Workspace& space = comm.workspace();
    float staged = 0;
    std::memcpy(&staged, space.buffer->local() + space.layout.slot_at(Stream::reduce, 0, 0), 4);
    EXPECT_EQ(staged, 1.0f);
  });
}

TEST(Link, AbortDoesNotWaitForTheWire) {
  const auto begin = Clock::now();
  EXPECT_THROW(on_link(2, "100kB/s,1ms",
                       [](Communicator& comm) {
                         const auto buffer = comm.allocate(20'000'000, 1);
                         const std::vector<std::byte> source(20'000'000);  // 200 s
                         comm.put(1 - comm.rank(), *buffer, 0, source.data(), source.size(), 0, 1);
                         if (comm.rank() == 0) {
                           comm.flush();
                         } else {
                           comm.abort("changed my mind");
                         }
                         comm.wait(*buffer, 0, 1, {"test"});
                       }),
               Aborted);
  EXPECT_LT(seconds_since(begin), 60);
}

// An all-reduce of N bytes over two ranks puts N bytes on each link.
TEST(Link, AllReduceTakesItsWireTime) {
  constexpr int64_t kElements = 1 << 20;
  const double wire = double(4 * kElements) / 200e6;
  double fastest = 1e9;
  for (int i = 0; i < kTries && fastest > wire * 1.3 + kSlack; ++i) {
    on_link(2, "200MB/s,50us", [&](Communicator& comm) {
      std::vector<float> data(kElements);
      comm.barrier();
      const auto begin = Clock::now();
      all_reduce(comm, Tensor(data.data(), DType::f32, {kElements}));
      if (comm.rank() == 0) fastest = std::min(fastest, seconds_since(begin));
    });
  }
  EXPECT_GE(fastest, wire * 0.95);
  EXPECT_LE(fastest, wire * 1.3 + kSlack);
}

}  // namespace
}  // namespace tandem
