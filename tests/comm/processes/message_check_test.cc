// Bits that are flipped in messages over sockets. Run with and without TANDEM_CHECK_MESSAGES.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <functional>
#include <mutex>
#include <thread>

#include "comm/message_fault.h"
#include "comm/processes/message.h"
#include "comm/processes/rank.h"
#include "comm/processes/rendezvous_bootstrap.h"
#include "core/system/env.h"
#include "tandem/random.h"

namespace tandem::test {
namespace {

using testing::Each;
using testing::HasSubstr;

constexpr size_t kMinBytes = 1000;  // more than messages of a barrier have

enum class Flip { none, contents, header };

struct Trial {
  int ranks, source;
  size_t bytes;
  Flip flip;
  uint32_t bit;
};

struct Outcome {
  std::vector<std::string> errors;
  int flipped_bits = 0;     ///< in what was received
  int64_t stray_bytes = 0;  ///< written elsewhere in the destination's buffer
};

/// Message from a rank to the next one of a world whose ranks have connections to each other.
Outcome send_message(const Trial& trial, const std::function<void()>& before_put = {}) {
  static std::atomic<int> worlds = 0;
  Launch launch;
  launch.size = trial.ranks;
  launch.host = "127.0.0.1";
  launch.one_host = true;
  launch.world = fmt::format("message check {} {}", getpid(), ++worlds);
  const int destination = (trial.source + 1) % trial.ranks;
  std::vector<std::byte> sent(trial.bytes);
  for (size_t i = 0; i < sent.size(); ++i) sent[i] = std::byte(philox(1, 2, i)[0]);
  std::mutex mutex;
  Outcome outcome;
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < trial.ranks; ++rank) {
    threads.emplace_back([&, rank, launch]() mutable {
      launch.rank = rank;
      std::shared_ptr<Communicator> comm;
      std::shared_ptr<SymmetricBuffer> buffer;
      try {
        comm = processes::new_member(
            std::make_unique<processes::RendezvousBootstrap>(launch, control::Secret{}, 30),
            {.deadline_s = 30});
        buffer = comm->allocate(4 * trial.bytes, 1);
        comm->barrier();
        if (rank == trial.source) {
          if (trial.flip == Flip::contents) flip_bit_of_next_message(trial.bit, kMinBytes);
          if (trial.flip == Flip::header) flip_bit_of_next_message(trial.bit, kMinBytes, true);
          if (before_put) before_put();
          comm->put(destination, *buffer, 0, sent.data(), sent.size(), 0, 1);
          comm->flush();
        }
        if (rank == destination) {
          comm->wait(*buffer, 0, 1, {"message", trial.source});
          for (size_t i = 0; i < sent.size(); ++i) {
            outcome.flipped_bits += std::popcount(uint8_t(sent[i] ^ buffer->local()[i]));
          }
        }
        comm->barrier("end");
      } catch (const Error& error) {
        const std::lock_guard lock(mutex);
        outcome.errors.push_back(error.what());
      }
      if (!buffer || rank != destination) return;
      const std::span all(buffer->local(), buffer->bytes());
      outcome.stray_bytes = std::ranges::count_if(
          all.subspan(trial.bytes), [](std::byte value) { return value != std::byte{0}; });
    });
  }
  threads.clear();
  return outcome;
}

void expect_flips_found(int trials, uint64_t seed) {
  constexpr size_t kSizes[] = {kMinBytes, 3000, 5000, 70'000, 300'000, 5'000'000};
  for (int i = 0; i < trials; ++i) {
    const auto draw = philox(seed, 1, uint64_t(i));
    const int ranks = 2 + int(draw[0] % 3), source = int(draw[1] % uint32_t(ranks));
    const size_t bytes = kSizes[draw[2] % std::size(kSizes)];
    SCOPED_TRACE(fmt::format("{} bytes from rank {} of {}, bit {}", bytes, source, ranks, draw[3]));
    const Outcome undisturbed = send_message({ranks, source, bytes, Flip::none, 0});
    EXPECT_THAT(undisturbed.errors, testing::IsEmpty());
    EXPECT_EQ(undisturbed.flipped_bits, 0);
    const Outcome flipped = send_message({ranks, source, bytes, Flip::contents, draw[3]});
    if (env().check_messages) {
      EXPECT_EQ(int(flipped.errors.size()), ranks);
      EXPECT_THAT(flipped.errors,
                  Each(HasSubstr(fmt::format("from rank {} to rank {} is corrupt: its hash differs",
                                             source, (source + 1) % ranks))));
    } else {
      EXPECT_THAT(flipped.errors, testing::IsEmpty());
      EXPECT_EQ(flipped.flipped_bits, 1);
    }
  }
}

/// Also where contents are not checked.
void expect_damaged_headers_found(int trials, uint64_t seed) {
  for (int i = 0; i < trials; ++i) {
    const auto draw = philox(seed, 1, uint64_t(i));
    const int ranks = 2 + int(draw[0] % 2), source = int(draw[1] % uint32_t(ranks));
    const size_t bytes = draw[2] % 2 ? 3000 : 100'000;
    SCOPED_TRACE(fmt::format("{} bytes from rank {} of {}, bit {}", bytes, source, ranks, draw[3]));
    const Outcome outcome = send_message({ranks, source, bytes, Flip::header, draw[3]});
    EXPECT_EQ(int(outcome.errors.size()), ranks);
    EXPECT_THAT(outcome.errors,
                Each(HasSubstr(fmt::format("header of a message from rank {} to rank {} is corrupt",
                                           source, (source + 1) % ranks))));
    EXPECT_EQ(outcome.stray_bytes, 0);
  }
}

TEST(MessageCheck, ADamagedHeaderWritesNothing) {
  expect_damaged_headers_found(4, 3);
}

TEST(MessageCheckLong, EveryDamagedHeaderIsFound) {
  expect_damaged_headers_found(200, 4);
}

// An offset that is damaged within the buffer, whose contents are intact.
TEST(MessageCheck, ADamagedOffsetWritesNothing) {
  const uint32_t bit = 8 * uint32_t(offsetof(processes::Header, offset)) + 12;
  const Outcome outcome = send_message({2, 0, 3000, Flip::header, bit});
  EXPECT_THAT(outcome.errors, Each(HasSubstr("header of a message from rank 0 to rank 1")));
  EXPECT_EQ(outcome.errors.size(), 2u);
  EXPECT_EQ(outcome.stray_bytes, 0);
}

TEST(MessageCheck, FindsAFlippedBitAndNamesBothRanks) {
  expect_flips_found(4, 1);
}

TEST(MessageCheckLong, FindsEveryFlippedBit) {
  expect_flips_found(200, 2);
}

// The communication thread of the sender cannot open the pipe of a zero-copy put.
TEST(MessageCheck, AnErrorOfTheCommunicationThreadIsNamed) {
  if (env().mpi_shm) GTEST_SKIP() << "needs TANDEM_MPI_SHM=0";
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  const rlimit none{0, limit.rlim_max};
  const Outcome outcome =
      send_message({3, 1, 300'000, Flip::none, 0}, [&] { setrlimit(RLIMIT_NOFILE, &none); });
  setrlimit(RLIMIT_NOFILE, &limit);
  EXPECT_EQ(outcome.errors.size(), 3u);
  EXPECT_THAT(outcome.errors,
              Each(HasSubstr("aborted by rank 1: its communication thread has failed: pipe: Too "
                             "many open files")));
}

}  // namespace
}  // namespace tandem::test
