// Generated faults of ranks that meet at the store, as process ranks and GPU ranks do: a rank dies
// before, during or after an exchange, comes late or never, and strangers connect meanwhile. Every
// other rank ends within its deadline, with the right result or an error that names the rank.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <thread>

#include "comm/rendezvous/endpoint.h"
#include "tandem/random.h"
#include "tests/comm/rendezvous/processes.h"

namespace tandem::test {
namespace {

constexpr double kDeadline = 60, kShortDeadline = 2;

enum class Fault { none, dies_in_exchange, dies_between, dies_after, late, absent };
constexpr int kFaults = 6;

struct Scenario {
  uint64_t seed;
  Fault fault;
  int size;
  bool one_host, strangers;
  int rounds;    ///< exchanges
  int round;     ///< the one during or before which the last rank dies
  int delay_us;  ///< before it dies, or comes
  std::string describe() const {
    return fmt::format("seed {}: fault {}, {} ranks, {}, {} rounds, round {}, {} us{}", seed,
                       int(fault), size, one_host ? "local" : "tcp", rounds, round, delay_us,
                       strangers ? ", strangers" : "");
  }
};

Scenario make_scenario(uint64_t seed) {
  uint64_t index = 0;
  const auto draw = [&](int bound) { return int(philox(seed, 0, index++)[0] % uint32_t(bound)); };
  Scenario s{};
  s.seed = seed;
  s.fault = Fault(int(seed) % kFaults);
  s.size = 2 + draw(5);
  s.one_host = draw(2) == 0;
  s.strangers = draw(2) == 0;
  s.rounds = 1 + draw(20);
  s.round = draw(s.rounds);
  s.delay_us = draw(20'000);
  return s;
}

[[noreturn]] void die() {
  kill(getpid(), SIGKILL);
  _exit(kWrong);
}

/// Bytes of a rank in a round: lengths differ, and some are empty.
std::vector<std::byte> make_blob(int rank, int round) {
  return std::vector<std::byte>(size_t(rank * 131 * (round % 3)), std::byte(uint8_t(rank + round)));
}

int exchange_blobs(Communicator& comm, const Scenario& s) {
  const bool is_faulty = comm.rank() == s.size - 1;
  std::thread killer;
  for (int round = 0; round < s.rounds; ++round) {
    if (is_faulty && round == s.round) {
      if (s.fault == Fault::dies_between) die();
      if (s.fault == Fault::dies_in_exchange) {
        killer = std::thread([&] {
          usleep(useconds_t(s.delay_us));
          die();
        });
      }
    }
    const auto all = comm.exchange(make_blob(comm.rank(), round), "blobs");
    for (int rank = 0; rank < comm.size(); ++rank) {
      if (all[size_t(rank)] != make_blob(rank, round)) return kWrong;
    }
    // The killer may be late: the round lasts until it comes.
    if (killer.joinable()) killer.join();
  }
  if (is_faulty && s.fault == Fault::dies_after) die();
  comm.barrier("end");
  return kRight;
}

/// Garbage, half messages and silence at the port or local socket, until `ended`.
void disturb(const Launch& launch, const std::atomic<bool>& ended) {
  const control::Endpoint endpoint = control::endpoint_of(launch);
  std::vector<control::Connection> open;
  for (int i = 0; !ended; ++i) {
    std::string why;
    auto connection = control::connect_to(endpoint, 1, why);
    if (connection.open()) {
      const std::vector<std::byte> garbage(size_t(i % 300), std::byte(uint8_t(i * 37)));
      const control::Header header{control::Kind::meet, 0, 0, ~0u, ~0u};
      const std::string_view magic(control::kMagic.data(), control::kMagic.size());
      const std::span<const std::byte> messages[] = {
          garbage, std::as_bytes(std::span(&header, 1)), std::as_bytes(std::span(magic)), {}};
      const auto message = messages[i % 4];
      send(connection.fd(), message.data(), message.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      open.push_back(std::move(connection));
    }
    if (open.size() > 200) open.clear();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

std::vector<pid_t> start_ranks(const Scenario& s, const Launch& launch) {
  const auto body = [&](Communicator& comm) { return exchange_blobs(comm, s); };
  if (s.fault == Fault::absent) return start(launch, all_ranks(s.size - 1), kShortDeadline, body);
  auto children = start(launch, all_ranks(s.size - 1), kDeadline, body);
  if (s.fault == Fault::late) usleep(useconds_t(10 * s.delay_us));
  children.push_back(start(launch, {s.size - 1}, kDeadline, body).front());
  return children;
}

std::vector<int> statuses_of(const Scenario& s) {
  const Launch launch = make_launch(s.size, s.one_host);
  const auto children = start_ranks(s, launch);
  std::atomic<bool> ended = false;
  std::thread strangers([&] {
    if (s.strangers) disturb(launch, ended);
  });
  auto statuses = finish(children);
  ended = true;
  strangers.join();
  return statuses;
}

std::vector<int> expected_of(const Scenario& s) {
  const bool dies = s.fault == Fault::dies_in_exchange || s.fault == Fault::dies_between ||
                    s.fault == Fault::dies_after;
  if (s.fault == Fault::absent) return std::vector<int>(size_t(s.size - 1), kTimeoutNamesIt);
  std::vector<int> expected(size_t(s.size), dies ? kAbortedNamesIt : kRight);
  if (dies) expected.back() = -SIGKILL;
  return expected;
}

void run_scenarios(uint64_t first, uint64_t count) {
  std::vector<std::pair<Scenario, std::vector<pid_t>>> waiting;  // these last for their deadline
  for (uint64_t seed = first; seed < first + count; ++seed) {
    const Scenario s = make_scenario(seed);
    if (s.fault == Fault::absent) {
      waiting.emplace_back(s, start_ranks(s, make_launch(s.size, s.one_host)));
    } else {
      EXPECT_EQ(statuses_of(s), expected_of(s)) << s.describe();
    }
  }
  for (const auto& [s, children] : waiting) {
    EXPECT_EQ(finish(children), expected_of(s)) << s.describe();
  }
}

TEST(Faults, OtherRanksEndWithTheRankNamed) {
  run_scenarios(0, 24);
}

TEST(FaultsLong, OtherRanksEndWithTheRankNamed) {
  run_scenarios(1000, 300);
}

// A rank that is killed while it connects is named by those that wait for it, or come later.
TEST(Faults, RankThatDiesWhileItConnectsIsNamed) {
  std::vector<pid_t> others, killed;
  for (int world = 0; world < 8; ++world) {
    const auto body = [](Communicator& comm) {
      comm.barrier("start");
      while (comm.rank() == 2) pause();
      comm.barrier("end");
      return kWrong;
    };
    const Launch launch = make_launch(3, world % 2 == 0);
    for (const pid_t child : start(launch, {0, 1}, kShortDeadline, body)) others.push_back(child);
    killed.push_back(start(launch, {2}, kShortDeadline, body).front());
    usleep(useconds_t(world / 2 * 2000));
    kill(killed.back(), SIGKILL);
  }
  for (const int status : finish(others)) {
    EXPECT_TRUE(status == kTimeoutNamesIt || status == kAbortedNamesIt) << status;
  }
  EXPECT_EQ(finish(killed), std::vector<int>(killed.size(), -SIGKILL));
}

class ManyRanks : public testing::TestWithParam<bool> {};  // whether the last one dies

// 128 processes, as in a world of 16 hosts with 8 GPUs each.
TEST_P(ManyRanks, ExchangeAndLearnOfADeadRank) {
  constexpr int kRanks = 128;
  const bool dies = GetParam();
  const auto statuses =
      finish(start(make_launch(kRanks, true), all_ranks(kRanks), 120, [&](Communicator& comm) {
        const int local = comm.rank();
        const auto all = comm.exchange(std::as_bytes(std::span(&local, 1)), "ranks");
        for (int rank = 0; rank < kRanks; ++rank) {
          if (std::memcmp(all[size_t(rank)].data(), &rank, sizeof rank) != 0) return kWrong;
        }
        const auto group = comm.split(comm.rank() / 8, 0);  // the ranks of one host
        group->barrier("host");
        if (dies && comm.rank() == kRanks - 1) die();
        comm.barrier("end");
        return kRight;
      }));
  std::vector<int> expected(kRanks, dies ? kAbortedNamesIt : kRight);
  if (dies) expected.back() = -SIGKILL;
  EXPECT_EQ(statuses, expected);
}

INSTANTIATE_TEST_SUITE_P(Death, ManyRanks, testing::Bool(),
                         [](const auto& dies) { return dies.param ? "OneDies" : "AllLive"; });

}  // namespace
}  // namespace tandem::test
