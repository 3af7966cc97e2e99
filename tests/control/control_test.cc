// Ranks that a launcher started as processes without MPI: who they are, that they agree, and that
// one which never comes or dies is named by all others in time.
#include "comm/control/control_communicator.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>

#include "comm/control/launch.h"
#include "comm/control/message.h"

namespace tandem::test {
namespace {

using control::ControlCommunicator;

// What a rank's process reports by its exit status.
enum Status { kRight = 0, kWrong = 1, kTimeoutNamesIt = 20, kAbortedNamesIt = 21 };

int free_port() {
  const control::Connection listener = control::listen_on("127.0.0.1", 0);
  sockaddr_in address{};
  socklen_t length = sizeof address;
  getsockname(listener.fd(), reinterpret_cast<sockaddr*>(&address), &length);
  return ntohs(address.sin_port);
}

// Runs `body` in a process for each of the `present` ranks; their statuses, in order.
std::vector<int> run_processes(int size, const std::vector<int>& present, double deadline_s,
                               const std::function<int(Communicator&)>& body) {
  const int port = free_port();
  std::vector<pid_t> children;
  for (const int rank : present) {
    const pid_t child = fork();
    if (child == 0) {
      int status = kWrong;
      try {
        run_control({rank, size, rank, "127.0.0.1", port}, {1, {}, deadline_s},
                    [&](Communicator& comm) { status = body(comm); });
      } catch (const Timeout& error) {
        status = error.peer == size - 1 ? kTimeoutNamesIt : kWrong;
      } catch (const Aborted& error) {
        status = error.origin == size - 1 ? kAbortedNamesIt : kWrong;
      } catch (const std::exception& error) {
        fprintf(stderr, "rank %d: %s\n", rank, error.what());
      }
      _exit(status);
    }
    children.push_back(child);
  }
  std::vector<int> statuses;
  for (const pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    statuses.push_back(WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status));
  }
  return statuses;
}

std::vector<int> all_ranks(int size) {
  std::vector<int> ranks;
  for (int r = 0; r < size; ++r) ranks.push_back(r);
  return ranks;
}

std::string text_of(const std::vector<std::byte>& blob) {
  return {reinterpret_cast<const char*>(blob.data()), blob.size()};
}

class Control : public testing::TestWithParam<int> {};

TEST_P(Control, EveryoneSeesEveryonesBlobAndSplitsAgree) {
  const int size = GetParam();
  const auto statuses = run_processes(size, all_ranks(size), 10, [&](Communicator& comm) {
    for (int round = 0; round < 50; ++round) {
      const std::string mine(size_t(round * 40 * (comm.rank() + 1)), char('a' + comm.rank()));
      const auto all = comm.exchange(std::as_bytes(std::span(mine.data(), mine.size())), "blobs");
      for (int r = 0; r < size; ++r) {
        const std::string expected(size_t(round * 40 * (r + 1)), char('a' + r));
        if (text_of(all[size_t(r)]) != expected) return kWrong;
      }
    }
    // Odd and even ranks, in reverse order.
    const auto part = comm.split(comm.rank() % 2, -comm.rank());
    const int members = size / 2 + (comm.rank() % 2 == 0 ? size % 2 : 0);
    if (part->size() != members) return kWrong;
    const int mine = comm.rank();
    const auto all = part->exchange(std::as_bytes(std::span(&mine, 1)), "part");
    for (int i = 0, last = size; i < members; ++i) {
      int theirs = 0;
      std::memcpy(&theirs, all[size_t(i)].data(), sizeof theirs);
      if (theirs % 2 != mine % 2 || theirs >= last) return kWrong;
      last = theirs;
    }
    comm.barrier("end");
    return kRight;
  });
  EXPECT_EQ(statuses, std::vector<int>(size_t(size), kRight));
}

TEST_P(Control, ARankThatNeverComesIsNamedByAllOthers) {
  const int size = GetParam();
  if (size == 1) GTEST_SKIP() << "nobody to wait for";
  const auto begin = std::chrono::steady_clock::now();
  const auto statuses = run_processes(size, all_ranks(size - 1), 1, [](Communicator& comm) {
    comm.barrier("start");
    return kWrong;
  });
  EXPECT_EQ(statuses, std::vector<int>(size_t(size - 1), kTimeoutNamesIt));
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  EXPECT_LT(took.count(), 6);
}

TEST_P(Control, ARankThatIsKilledIsNamedByAllOthers) {
  const int size = GetParam();
  if (size < 3) GTEST_SKIP() << "rank 0's end is another test's";
  auto expected = std::vector<int>(size_t(size), kAbortedNamesIt);
  expected.back() = -SIGKILL;
  const auto statuses = run_processes(size, all_ranks(size), 20, [&](Communicator& comm) {
    for (int i = 0;; ++i) {
      if (i == 20 && comm.rank() == size - 1) kill(getpid(), SIGKILL);
      comm.barrier("step");
    }
    return kWrong;
  });
  EXPECT_EQ(statuses, expected);
}

// In an exchange, and where a rank waits for something else and only looks for aborts.
TEST_P(Control, RankZeroThatIsKilledIsNamedByAllOthers) {
  const int size = GetParam();
  if (size == 1) GTEST_SKIP() << "nobody is left";
  const auto begin = std::chrono::steady_clock::now();
  const auto statuses = run_processes(size, all_ranks(size), 20, [&](Communicator& comm) {
    const auto mine = comm.allocate(0, 1);
    try {
      comm.barrier("start");
      if (comm.rank() == 0) {
        usleep(100000);  // its hub answers the others
        kill(getpid(), SIGKILL);
      }
      while (comm.rank() == 1 &&
             std::chrono::steady_clock::now() - begin < std::chrono::seconds(5)) {
        comm.wait(*mine, 0, 0, {});
      }
      comm.barrier("never");
    } catch (const Aborted& error) {
      return error.origin == 0 ? kRight : kWrong;
    }
    return kWrong;
  });
  std::vector<int> expected(size_t(size), kRight);
  expected.front() = -SIGKILL;
  EXPECT_EQ(statuses, expected);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  EXPECT_LT(took.count(), 5);
}

TEST_P(Control, ARankMayHaveMoreToDoThanRankZero) {
  const int size = GetParam();
  if (size != 2) GTEST_SKIP() << "one size: it takes longer than the hub's patience";
  const auto statuses = run_processes(size, all_ranks(size), 20, [&](Communicator& comm) {
    const auto mine = comm.allocate(0, 1);
    comm.barrier("start");
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(5);
    while (comm.rank() != 0 && std::chrono::steady_clock::now() < until) {
      comm.wait(*mine, 0, 0, {});
    }
    return kRight;
  });
  EXPECT_EQ(statuses, std::vector<int>(size_t(size), kRight));
}

TEST_P(Control, AnAbortReachesWhoWaitsAndWhoOnlyLooks) {
  const int size = GetParam();
  if (size < 3) GTEST_SKIP() << "rank 0 looks, another waits, the last aborts";
  const auto statuses = run_processes(size, all_ranks(size), 20, [&](Communicator& comm) {
    const auto mine = comm.allocate(0, 1);
    comm.barrier("start");
    try {
      if (comm.rank() == size - 1) {
        comm.abort("on purpose");
        comm.barrier("never");
      } else if (comm.rank() == 0) {  // as a wait for a GPU's signal does
        const auto begin = std::chrono::steady_clock::now();
        while (std::chrono::steady_clock::now() - begin < std::chrono::seconds(20)) {
          comm.wait(*mine, 0, 0, {});
        }
      } else {
        comm.barrier("never");
      }
    } catch (const Aborted& error) {
      const bool said = std::string_view(error.what()).find("on purpose") != std::string::npos;
      return said && error.origin == size - 1 ? kRight : kWrong;
    }
    return kWrong;
  });
  EXPECT_EQ(statuses, std::vector<int>(size_t(size), kRight));
}

TEST_P(Control, DifferentCallsAreAMismatch) {
  const int size = GetParam();
  if (size == 1) GTEST_SKIP() << "one rank always agrees";
  const auto statuses = run_processes(size, all_ranks(size), 10, [&](Communicator& comm) {
    try {
      comm.barrier(comm.rank() == 1 ? "there" : "here");
    } catch (const Mismatch&) {
      return kRight;
    }
    return kWrong;
  });
  EXPECT_EQ(statuses, std::vector<int>(size_t(size), kRight));
}

INSTANTIATE_TEST_SUITE_P(Ranks, Control, testing::Values(1, 2, 3, 5));

class Environment : public testing::Test {
 protected:
  void SetUp() override {
    for (const char* name : kNames) unsetenv(name);
  }
  void TearDown() override { SetUp(); }
  static void set(std::initializer_list<std::pair<const char*, const char*>> variables) {
    for (const auto& [name, value] : variables) setenv(name, value, 1);
  }
  static constexpr const char* kNames[] = {"RANK",
                                           "WORLD_SIZE",
                                           "LOCAL_RANK",
                                           "MASTER_ADDR",
                                           "MASTER_PORT",
                                           "SLURM_PROCID",
                                           "SLURM_STEP_NUM_TASKS",
                                           "SLURM_LOCALID",
                                           "SLURM_JOB_ID",
                                           "SLURM_STEP_NODELIST",
                                           "TORCHELASTIC_USE_AGENT_STORE"};
};

TEST_F(Environment, SaysWhichRankThisIs) {
  EXPECT_FALSE(launched_by_environment());
  set({{"RANK", "5"},
       {"WORLD_SIZE", "8"},
       {"LOCAL_RANK", "1"},
       {"MASTER_ADDR", "node7"},
       {"MASTER_PORT", "29500"}});
  auto launch = launched_by_environment();
  ASSERT_TRUE(launch);
  EXPECT_EQ(launch->rank, 5);
  EXPECT_EQ(launch->size, 8);
  EXPECT_EQ(launch->local_rank, 1);
  EXPECT_EQ(launch->host, "node7");
  EXPECT_EQ(launch->port, 29500);
  set({{"TORCHELASTIC_USE_AGENT_STORE", "True"}});
  EXPECT_EQ(launched_by_environment()->port, 29501);
  set({{"WORLD_SIZE", "5"}});
  EXPECT_THROW(launched_by_environment(), InvalidArgument);
  set({{"WORLD_SIZE", "8"}});
  unsetenv("MASTER_ADDR");
  try {
    launched_by_environment();
    ADD_FAILURE() << "a world without an address";
  } catch (const InvalidArgument& error) {
    EXPECT_STREQ(error.what(),
                 "MASTER_ADDR is not set: RANK=5 WORLD_SIZE=8: expected rank 0's host");
  }
  set({{"RANK", "0"}, {"WORLD_SIZE", "1"}});
  EXPECT_FALSE(launched_by_environment());
  SetUp();
  set({{"SLURM_PROCID", "3"},
       {"SLURM_STEP_NUM_TASKS", "4"},
       {"SLURM_LOCALID", "1"},
       {"SLURM_JOB_ID", "1234567"},
       {"SLURM_STEP_NODELIST", "gpu[003-004,7],login1"}});
  launch = launched_by_environment();
  ASSERT_TRUE(launch);
  EXPECT_EQ(launch->rank, 3);
  EXPECT_EQ(launch->local_rank, 1);
  EXPECT_EQ(launch->host, "gpu003");
  EXPECT_EQ(launch->port, 20000 + 1234567 % 20000);
  // Of torchrun's variables those without an address say less than srun's.
  set({{"RANK", "0"}, {"WORLD_SIZE", "1"}});
  ASSERT_TRUE(launched_by_environment());
  EXPECT_EQ(launched_by_environment()->size, 4);
  set({{"SLURM_STEP_NUM_TASKS", "1"}, {"SLURM_PROCID", "0"}});
  EXPECT_FALSE(launched_by_environment());  // alone: a plain program
}

TEST_F(Environment, NodeListsBeginWithTheirFirstHost) {
  EXPECT_EQ(first_host("gpu1"), "gpu1");
  EXPECT_EQ(first_host("gpu1,gpu2"), "gpu1");
  EXPECT_EQ(first_host("gpu[01,05]"), "gpu01");
  EXPECT_EQ(first_host("gpu[12]"), "gpu12");
}

}  // namespace
}  // namespace tandem::test
