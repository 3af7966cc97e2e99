// Worlds of ranks that share this process, each with its own engine and its connection to the
// rendezvous store: many, and several worlds one after another.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <mutex>
#include <thread>

#include "comm/group.h"
#include "comm/processes/rank.h"
#include "comm/processes/rendezvous_bootstrap.h"
#include "core/system/process/file_limit.h"
#include "tandem/collectives.h"

namespace tandem::test {
namespace {

using testing::HasSubstr;

using MakeBootstrap = std::function<std::unique_ptr<processes::Bootstrap>(const Launch&)>;

/// Runs `body` on each of the `present` ranks of a world of `size`, and returns their errors.
std::vector<std::string> run_members(int size, const std::vector<int>& present, double deadline_s,
                                     const std::function<void(Communicator&)>& body,
                                     const MakeBootstrap& make_bootstrap = {}) {
  static std::atomic<int> worlds = 0;
  raise_file_limit();
  Launch launch;
  launch.size = size;
  launch.host = "127.0.0.1";
  launch.one_host = true;
  launch.world = fmt::format("members {} {}", getpid(), ++worlds);
  std::mutex mutex;
  std::vector<std::string> errors;
  std::vector<std::jthread> threads;
  for (const int rank : present) {
    threads.emplace_back([&, rank, launch]() mutable {
      launch.rank = rank;
      try {
        auto bootstrap = make_bootstrap ? make_bootstrap(launch)
                                        : std::make_unique<processes::RendezvousBootstrap>(
                                              launch, control::Secret{}, deadline_s);
        const auto comm = processes::new_member(std::move(bootstrap), {.deadline_s = deadline_s});
        body(*comm);
      } catch (const Error& error) {
        const std::lock_guard lock(mutex);
        errors.push_back(error.what());
      }
    });
  }
  threads.clear();
  return errors;
}

std::vector<int> first_ranks(int count) {
  std::vector<int> ranks(static_cast<size_t>(count));
  for (int rank = 0; rank < count; ++rank) ranks[size_t(rank)] = rank;
  return ranks;
}

// More ranks than exchange directly: their calls go through the store.
TEST(Members, LargeWorldsExchangeAndMeet) {
  constexpr int kRanks = 72;
  const auto errors = run_members(kRanks, first_ranks(kRanks), 60, [](Communicator& comm) {
    for (int round = 0; round < 3; ++round) {
      const std::string local(size_t(comm.rank() % 5), char('a' + round));
      const auto all = comm.exchange(std::as_bytes(std::span(local)), "blobs");
      ASSERT_EQ(int(all.size()), comm.size());
      for (int rank = 0; rank < comm.size(); ++rank) {
        const std::string_view blob(reinterpret_cast<const char*>(all[size_t(rank)].data()),
                                    all[size_t(rank)].size());
        EXPECT_EQ(blob, std::string(size_t(rank % 5), char('a' + round)));
      }
      comm.barrier();
    }
    comm.require_same("value", "one");
    EXPECT_THROW(comm.require_same("value", comm.rank() == 50 ? "two" : "one"), Mismatch);
    EXPECT_THROW(comm.barrier(comm.rank() == 71 ? "another" : "call"), Mismatch);
    const auto half = comm.split(comm.rank() % 2, -comm.rank());
    EXPECT_EQ(half->size(), kRanks / 2);
    EXPECT_EQ(half->rank(), (kRanks - 1 - comm.rank()) / 2);
    float sum = 1;
    all_reduce(*half, Tensor::of(&sum, {1}));
    EXPECT_EQ(sum, kRanks / 2);
  });
  EXPECT_THAT(errors, testing::IsEmpty());
}

/// Exchanges a blob of `lengths[rank]` bytes of each rank.
void expect_exchanged(const std::vector<size_t>& lengths, double deadline_s) {
  const int ranks = int(lengths.size());
  std::vector<std::vector<std::byte>> blobs;
  for (const size_t bytes : lengths) {
    auto& blob = blobs.emplace_back(bytes);
    for (size_t i = 0; i < bytes; ++i) blob[i] = std::byte(uint8_t(blobs.size() + i * 7 / 3));
  }
  const auto errors = run_members(ranks, first_ranks(ranks), deadline_s, [&](Communicator& comm) {
    EXPECT_TRUE(comm.exchange(blobs[size_t(comm.rank())], "blobs") == blobs);
    comm.barrier();
  });
  EXPECT_THAT(errors, testing::IsEmpty());
}

// Lengths that need several meetings, of one rank, of some and of all.
TEST(Members, LargeWorldsExchangeBlobsOfAnySize) {
  std::vector<size_t> one(66, 0), some(66), all(66, 100'000);
  one[7] = 300'000;
  for (size_t rank = 0; rank < some.size(); ++rank) {
    some[rank] = rank % 3 == 0 ? rank * 4'000 : rank % 3 - 1;
  }
  for (const auto& lengths : {one, some, all}) expect_exchanged(lengths, 120);
}

// More bytes than a message of the store may have; each rank receives all of them.
TEST(MembersLong, LargeWorldsExchangeMoreThanAMessageHolds) {
  expect_exchanged(std::vector<size_t>(65, control::kMaxBlobBytes / 65 + 1000), 300);
}

TEST(Members, AProcessMayHoldWorldsOneAfterAnother) {
  for (int world = 0; world < 5; ++world) {
    const auto errors = run_members(3, first_ranks(3), 30, [&](Communicator& comm) {
      float value = float(world + comm.rank());
      all_reduce(comm, Tensor::of(&value, {1}));
      EXPECT_EQ(value, float(3 * world + 3));
    });
    EXPECT_THAT(errors, testing::IsEmpty());
  }
}

TEST(Members, ARankThatNeverComesIsNamed) {
  const auto errors = run_members(4, {0, 1, 3}, 0.5, [](Communicator&) { FAIL(); });
  ASSERT_EQ(errors.size(), 3u);
  for (const auto& error : errors) EXPECT_THAT(error, HasSubstr("waited 0.5 s for rank 2"));
}

// The others ask who is missing just before the last rank comes, and whether it has ended just
// after it has left: it was there.
TEST(Members, ARankMayLeaveAtOnceAfterTheLastMeeting) {
  constexpr int kRanks = 70, kWorlds = 12;
  for (int world = 0; world < kWorlds; ++world) {
    const auto late = std::chrono::microseconds(248'000 + 1'000 * world);
    const auto errors = run_members(kRanks, first_ranks(kRanks), 60, [&](Communicator& comm) {
      comm.barrier();
      if (comm.rank() == 33) std::this_thread::sleep_for(late);
      comm.barrier("last");
    });
    ASSERT_THAT(errors, testing::IsEmpty()) << "world " << world;
  }
}

TEST(Members, AnErrorOfOneEndsTheWaitsOfAll) {
  constexpr int kRanks = 70;
  const auto errors = run_members(kRanks, first_ranks(kRanks), 60, [](Communicator& comm) {
    if (comm.rank() == 33) return comm.abort("out of luck");
    comm.barrier("never");
  });
  ASSERT_EQ(int(errors.size()), kRanks - 1);
  for (const auto& error : errors) EXPECT_THAT(error, HasSubstr("rank 33: out of luck"));
}

// As under MPI: a rank that has ended waits for the others, here for longer than its lease.
class BootstrapToTheEnd final : public processes::Bootstrap {
 public:
  explicit BootstrapToTheEnd(const Launch& launch)
      : rendezvous_(launch, control::Secret{}, kDeadlineSeconds) {
    rank_ = launch.rank;
    size_ = launch.size;
    deadline_s_ = kDeadlineSeconds;
  }
  double lease_s() const override { return kLeaseSeconds; }
  std::string_view transport() const override { return rendezvous_.transport(); }
  control::Connection connect_to_store() override { return rendezvous_.connect_to_store(); }
  bool has_fabric() const override { return false; }
  bool must_end_together() const override { return true; }
  std::unique_ptr<processes::Transport> make_transport(processes::TransportSink& sink,
                                                       processes::EventFd& event_fd) override {
    return rendezvous_.make_transport(sink, event_fd);
  }

  static constexpr double kDeadlineSeconds = 60, kLeaseSeconds = 3;

 private:
  processes::RendezvousBootstrap rendezvous_;
};

TEST(Members, ARankThatHasEndedKeepsItsLease) {
  const auto errors = run_members(
      3, first_ranks(3), 60,
      [](Communicator& comm) {
        const auto pair = comm.split(comm.rank() == 2, 0);
        if (comm.rank() == 2) return;
        std::this_thread::sleep_for(
            std::chrono::duration<double>(2 * BootstrapToTheEnd::kLeaseSeconds));
        pair->barrier();
      },
      [](const Launch& launch) { return std::make_unique<BootstrapToTheEnd>(launch); });
  EXPECT_THAT(errors, testing::IsEmpty());
}

TEST(Members, ARankThatHasLeftIsNamed) {
  constexpr int kRanks = 70;
  const auto errors = run_members(kRanks, first_ranks(kRanks), 60, [](Communicator& comm) {
    if (comm.rank() != 33) comm.barrier("never");
  });
  ASSERT_EQ(int(errors.size()), kRanks - 1);
  for (const auto& error : errors) EXPECT_THAT(error, HasSubstr("rank 33: never: it has left"));
}

}  // namespace
}  // namespace tandem::test
