// The first cause of a failure is kept. A thread plays the GPU, whose waits time out independently.
#include "comm/device/error_record.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "comm/processes/rank.h"
#include "comm/processes/rendezvous_bootstrap.h"
#include "comm/rendezvous/launch.h"

namespace tandem::test {
namespace {

using namespace gpu;
using std::chrono::milliseconds;

constexpr milliseconds kGrace{100};
constexpr double kWorldDeadline = 20;
constexpr OpId kToyWait{30};
const WaitNames kNames{{kToyWait, "toy"}};

// Like report_timeout of device_signal.cuh.
void give_up(ErrorRecord& record, int peer, milliseconds writing = {}) {
  int none = ErrorRecord::kNone;
  std::atomic_ref state(record.state);
  if (!state.compare_exchange_strong(none, ErrorRecord::kWriting)) return;
  std::this_thread::sleep_for(writing);
  record.op = int(kToyWait);
  record.peer = peer;
  record.epoch = 7;
  state = ErrorRecord::kTimeout;
}

TEST(ErrorRecordTest, NumberHasOneName) {
  EXPECT_EQ(name_of(OpId::reduce_scatter), "reduce_scatter");
  EXPECT_EQ(name_of(OpId::recv), "recv");
  EXPECT_EQ(name_of(kToyWait), "toy");
  EXPECT_EQ(name_of(OpId(29)), "?");
  EXPECT_EQ(name_of(OpId(-1)), "?");
  EXPECT_NO_THROW((WaitNames{{kToyWait, "toy"}}));
  EXPECT_THROW((WaitNames{{kToyWait, "other"}}), std::logic_error);
  EXPECT_THROW((WaitNames{{OpId(99), "large"}}), std::out_of_range);
}

TEST(ErrorRecordTest, AbortDoesNotReplaceATimeout) {
  ErrorRecord record;
  give_up(record, 3);
  end_waits(record);
  const auto timeout = timeout_in(record, 1, 20);
  ASSERT_TRUE(timeout);
  EXPECT_EQ(timeout->peer, 3);
  EXPECT_EQ(timeout->rank, 1);
  EXPECT_EQ(timeout->op, "toy");
  EXPECT_EQ(timeout->epoch, 7u);
}

TEST(ErrorRecordTest, AbortEndsWaitsThatHaveNotTimedOut) {
  ErrorRecord record;
  EXPECT_FALSE(end_after_abort(record, 0, 20, milliseconds(5)));
  EXPECT_EQ(state_of(record), ErrorRecord::kAborted);
  give_up(record, 3);  // too late: the wait has ended
  EXPECT_FALSE(timeout_in(record, 0, 20));
}

TEST(ErrorRecordTest, WaitAboutToTimeOutIsReported) {
  for (const milliseconds writing : {milliseconds(0), milliseconds(50)}) {
    ErrorRecord record;
    std::jthread device([&] {
      std::this_thread::sleep_for(milliseconds(20));
      give_up(record, 2, writing);
    });
    const auto timeout = end_after_abort(record, 0, 20, std::chrono::seconds(10));
    ASSERT_TRUE(timeout) << writing.count();
    EXPECT_EQ(timeout->peer, 2);
  }
}

// Rank 2 hangs. Rank 0's GPU times out and its program aborts the world; rank 1's GPU has timed out
// as well, or does so within the grace period.
int rank_next_to_a_hung_one(Communicator& comm, bool late) {
  const auto aborts = comm.allocate(0, 1);
  ErrorRecord record;
  comm.barrier("start");
  if (comm.rank() == 2) {
    pause();
    return 1;
  }
  std::jthread device([&] {
    std::this_thread::sleep_for(milliseconds(comm.rank() == 1 && late ? 330 : 300));
    give_up(record, 2);
  });
  if (comm.rank() == 0) {
    while (state_of(record) != ErrorRecord::kTimeout) std::this_thread::sleep_for(milliseconds(1));
    const auto timeout = timeout_in(record, 0, 0.3);
    end_waits(record);
    comm.abort(timeout->what());
    return timeout_in(record, 0, 0.3) && timeout->peer == 2 ? 0 : 1;
  }
  if (!late) device.join();
  try {
    for (const auto begin = std::chrono::steady_clock::now();
         std::chrono::steady_clock::now() - begin < std::chrono::seconds(10);) {
      comm.wait(*aborts, 0, 0, {});
    }
  } catch (const Aborted&) {
    const auto timeout = end_after_abort(record, 1, 0.3, kGrace);
    return timeout && timeout->peer == 2 && timeout->rank == 1 ? 0 : 2;
  }
  return 3;
}

TEST(ErrorRecordTest, HungRankIsNamedByAllOthers) {
  for (const bool late : {false, true}) {
    const Launch launch{.size = 3,
                        .host = "127.0.0.1",
                        .port = 29500,
                        .port_from = {},
                        .one_host = true,
                        .world = "hung rank " + std::to_string(getpid())};
    std::vector<pid_t> children;
    for (int rank = 0; rank < 3; ++rank) {
      const pid_t child = fork();
      if (child == 0) {
        int status = 4;
        try {
          Launch local = launch;
          local.rank = local.local_rank = rank;
          processes::Engine engine(std::make_unique<processes::RendezvousBootstrap>(
              local, control::Secret{}, kWorldDeadline));
          processes::run(engine, {.deadline_s = kWorldDeadline},
                         [&](Communicator& comm) { status = rank_next_to_a_hung_one(comm, late); });
        } catch (const std::exception& error) {
          fprintf(stderr, "rank %d: %s\n", rank, error.what());
        }
        _exit(status);
      }
      children.push_back(child);
    }
    for (const int rank : {0, 1}) {
      int status = 0;
      waitpid(children[size_t(rank)], &status, 0);
      EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0)
          << "rank " << rank << " ended with " << WEXITSTATUS(status);
    }
    kill(children[2], SIGKILL);
    waitpid(children[2], nullptr, 0);
  }
}

}  // namespace
}  // namespace tandem::test
