// Bits that are flipped in messages over sockets. Run with and without TANDEM_CHECK_MESSAGES.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <bit>
#include <cstring>
#include <mutex>
#include <thread>

#include "comm/message_fault.h"
#include "comm/processes/rank.h"
#include "comm/processes/rendezvous_bootstrap.h"
#include "core/env.h"
#include "tandem/random.h"

namespace tandem::test {
namespace {

using testing::Each;
using testing::HasSubstr;

constexpr size_t kMinBytes = 1000;  // more than messages of a barrier have

struct Trial {
  int ranks, source;
  size_t bytes;
  int64_t bit;  ///< -1: none
};

struct Outcome {
  std::vector<std::string> errors;
  int flipped_bits = 0;  ///< in what was received
};

/// Message from a rank to the next one of a world whose ranks have connections to each other.
Outcome send_message(const Trial& trial) {
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
      try {
        const auto comm = processes::new_member(
            std::make_unique<processes::RendezvousBootstrap>(launch, control::Secret{}, 30),
            {.deadline_s = 30});
        const auto buffer = comm->allocate(trial.bytes, 1);
        comm->barrier();
        if (rank == trial.source) {
          if (trial.bit >= 0) flip_bit_of_next_message(uint32_t(trial.bit), kMinBytes);
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
    const Outcome undisturbed = send_message({ranks, source, bytes, -1});
    EXPECT_THAT(undisturbed.errors, testing::IsEmpty());
    EXPECT_EQ(undisturbed.flipped_bits, 0);
    const Outcome flipped = send_message({ranks, source, bytes, draw[3]});
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

TEST(MessageCheck, FindsAFlippedBitAndNamesBothRanks) {
  expect_flips_found(4, 1);
}

TEST(MessageCheckLong, FindsEveryFlippedBit) {
  expect_flips_found(200, 2);
}

}  // namespace
}  // namespace tandem::test
