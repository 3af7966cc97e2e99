// Ranks started by a launcher as processes without MPI: their identity, agreement, and prompt
// reports by all others that name a rank which is missing or dies.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>

#include "comm/rendezvous/launch.h"
#include "core/system/machine.h"
#include "tests/comm/rendezvous/processes.h"

namespace tandem::test {
namespace {

std::string text_of(const std::vector<std::byte>& blob) {
  return {reinterpret_cast<const char*>(blob.data()), blob.size()};
}

// Number of ranks, and whether they connect by a local socket instead of TCP.
class Control : public testing::TestWithParam<std::tuple<int, bool>> {
 protected:
  static int ranks() { return std::get<0>(GetParam()); }
  static std::vector<int> run_processes(int size, const std::vector<int>& present,
                                        double deadline_s,
                                        const std::function<int(Communicator&)>& body) {
    return finish(start(make_launch(size, std::get<1>(GetParam())), present, deadline_s, body));
  }
};

TEST_P(Control, ExchangeReachesEveryRankAndSplitsAgree) {
  const int size = ranks();
  const auto statuses = run_processes(size, all_ranks(size), 10, [&](Communicator& comm) {
    for (int round = 0; round < 50; ++round) {
      const std::string local(size_t(round * 40 * (comm.rank() + 1)), char('a' + comm.rank()));
      const auto all = comm.exchange(std::as_bytes(std::span(local.data(), local.size())), "blobs");
      for (int r = 0; r < size; ++r) {
        const std::string expected(size_t(round * 40 * (r + 1)), char('a' + r));
        if (text_of(all[size_t(r)]) != expected) return kWrong;
      }
    }
    // Odd and even ranks, in reverse order.
    const auto group = comm.split(comm.rank() % 2, -comm.rank());
    const int members = size / 2 + (comm.rank() % 2 == 0 ? size % 2 : 0);
    if (group->size() != members) return kWrong;
    const int local = comm.rank();
    const auto all = group->exchange(std::as_bytes(std::span(&local, 1)), "group");
    for (int i = 0, last = size; i < members; ++i) {
      int remote = 0;
      std::memcpy(&remote, all[size_t(i)].data(), sizeof remote);
      if (remote % 2 != local % 2 || remote >= last) return kWrong;
      last = remote;
    }
    comm.barrier("end");
    return kRight;
  });
  EXPECT_EQ(statuses, std::vector<int>(size_t(size), kRight));
}

TEST_P(Control, MissingRankIsNamedByAllOthers) {
  const int size = ranks();
  if (size == 1) GTEST_SKIP() << "nobody to wait for";
  const auto begin = std::chrono::steady_clock::now();
  const auto statuses = run_processes(size, all_ranks(size - 1), 1, [](Communicator& comm) {
    comm.barrier("start");
    return kWrong;
  });
  EXPECT_EQ(statuses, std::vector<int>(size_t(size - 1), kTimeoutNamesIt));
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  EXPECT_LT(took.count(), 60);
}

TEST_P(Control, KilledRankIsNamedByAllOthers) {
  const int size = ranks();
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

// Rank 0 dies during an exchange, and while a rank waits for something else and only polls for
// aborts.
TEST_P(Control, KilledRankZeroIsNamedByAllOthers) {
  const int size = ranks();
  if (size == 1) GTEST_SKIP() << "nobody is left";
  const auto begin = std::chrono::steady_clock::now();
  const auto statuses = run_processes(size, all_ranks(size), 200, [&](Communicator& comm) {
    const auto local = comm.allocate(0, 1);
    try {
      comm.barrier("start");
      if (comm.rank() == 0) {
        usleep(100000);  // its server answers the others
        kill(getpid(), SIGKILL);
      }
      while (comm.rank() == 1 &&
             std::chrono::steady_clock::now() - begin < std::chrono::seconds(60)) {
        comm.wait(*local, 0, 0, {});
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
  EXPECT_LT(took.count(), 60);
}

TEST_P(Control, RankMayFinishLongAfterRankZero) {
  const int size = ranks();
  if (size != 2) GTEST_SKIP() << "one size: it takes longer than the store's grace";
  const auto statuses = run_processes(size, all_ranks(size), 200, [&](Communicator& comm) {
    const auto local = comm.allocate(0, 1);
    comm.barrier("start");
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(5);
    while (comm.rank() != 0 && std::chrono::steady_clock::now() < until) {
      comm.wait(*local, 0, 0, {});
    }
    return kRight;
  });
  EXPECT_EQ(statuses, std::vector<int>(size_t(size), kRight));
}

TEST_P(Control, AbortReachesWaitingAndPollingRanks) {
  const int size = ranks();
  if (size < 3) GTEST_SKIP() << "rank 0 looks, another waits, the last aborts";
  const auto statuses = run_processes(size, all_ranks(size), 200, [&](Communicator& comm) {
    const auto local = comm.allocate(0, 1);
    try {
      comm.barrier("start");  // its messages may come after the abort
      if (comm.rank() == size - 1) {
        comm.abort("on purpose");
        comm.barrier("never");
      } else if (comm.rank() == 0) {  // like a wait for a GPU's signal
        const auto begin = std::chrono::steady_clock::now();
        while (std::chrono::steady_clock::now() - begin < std::chrono::seconds(20)) {
          comm.wait(*local, 0, 0, {});
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
  const int size = ranks();
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

INSTANTIATE_TEST_SUITE_P(Ranks, Control,
                         testing::Combine(testing::Values(1, 2, 3, 5), testing::Bool()),
                         [](const auto& test) {
                           const bool one_host = std::get<1>(test.param);
                           return (one_host ? "local" : "tcp") +
                                  std::to_string(std::get<0>(test.param));
                         });

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
                                           "LOCAL_WORLD_SIZE",
                                           "MASTER_ADDR",
                                           "MASTER_PORT",
                                           "SLURM_PROCID",
                                           "SLURM_STEP_NUM_TASKS",
                                           "SLURM_LOCALID",
                                           "SLURM_JOB_ID",
                                           "SLURM_STEP_ID",
                                           "SLURM_STEP_NODELIST",
                                           "SLURM_STEP_TASKS_PER_NODE",
                                           "SLURM_NODEID",
                                           "OMPI_COMM_WORLD_SIZE",
                                           "OMPI_COMM_WORLD_LOCAL_SIZE",
                                           "MV2_COMM_WORLD_SIZE",
                                           "PMI_SIZE",
                                           "PMIX_RANK",
                                           "TORCHELASTIC_RUN_ID",
                                           "TORCHELASTIC_USE_AGENT_STORE"};
};

TEST_F(Environment, GivesRankAndSize) {
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
  EXPECT_EQ(launch->port, 20000 + 1234567 % 12000);
  set({{"SLURM_STEP_ID", "0"}});
  EXPECT_EQ(launched_by_environment()->port, launch->port);
  set({{"SLURM_STEP_ID", "1"}});  // a concurrent step of the same job
  EXPECT_NE(launched_by_environment()->port, launch->port);
  // torchrun's variables without an address are overridden by srun's.
  set({{"RANK", "0"}, {"WORLD_SIZE", "1"}});
  ASSERT_TRUE(launched_by_environment());
  EXPECT_EQ(launched_by_environment()->size, 4);
  set({{"SLURM_STEP_NUM_TASKS", "1"}, {"SLURM_PROCID", "0"}});
  EXPECT_FALSE(launched_by_environment());  // single process: not launched
}

TEST_F(Environment, IncompleteTorchrunVariablesAreRefused) {
  const auto said = [](const char* name, const char* value) {
    setenv(name, value, 1);
    std::string text = "let go";
    try {
      launched_by_environment();
    } catch (const InvalidArgument& error) {
      text = error.what();
    }
    unsetenv(name);
    return text;
  };
  EXPECT_EQ(said("RANK", "1"),
            "RANK=1 without WORLD_SIZE: expected both, as torchrun sets them, or neither");
  EXPECT_EQ(said("WORLD_SIZE", "2"),
            "WORLD_SIZE=2 without RANK: expected both, as torchrun sets them, or neither");
  EXPECT_EQ(said("WORLD_SIZE", "1"), "let go");
}

TEST_F(Environment, GivesTheRankCountOfMpiLaunchers) {
  EXPECT_FALSE(launched_by_some_mpi());
  set({{"PMIX_RANK", "0"}});
  EXPECT_FALSE(launched_by_some_mpi());
  set({{"SLURM_STEP_NUM_TASKS", "6"}});
  EXPECT_EQ(launched_by_some_mpi()->size, 6);
  for (const char* name : {"MV2_COMM_WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"}) {
    set({{name, "3"}});
    EXPECT_STREQ(launched_by_some_mpi()->variable, name);
  }
  EXPECT_EQ(launched_by_some_mpi()->size, 3);
}

TEST_F(Environment, GivesTheRankCountOfThisHost) {
  EXPECT_EQ(slurm_tasks_of("2(x3),1", 0), 2);
  EXPECT_EQ(slurm_tasks_of("2(x3),1", 2), 2);
  EXPECT_EQ(slurm_tasks_of("2(x3),1", 3), 1);
  EXPECT_EQ(slurm_tasks_of("2(x3),1", 4), 0);
  EXPECT_EQ(slurm_tasks_of("", 0), 0);
  EXPECT_EQ(ranks_here(12), 12);
  set({{"SLURM_PROCID", "9"},
       {"SLURM_STEP_NUM_TASKS", "12"},
       {"SLURM_NODEID", "2"},
       {"SLURM_STEP_TASKS_PER_NODE", "4(x2),3,1"}});
  EXPECT_EQ(ranks_here(12), 3);
  EXPECT_EQ(ranks_here(5), 5);  // thread-ranks of a launched process
  set({{"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}});
  EXPECT_EQ(ranks_here(12), 2);
}

TEST_F(Environment, TellsWhetherAllRanksAreOnOneHost) {
  set({{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_PORT", "29500"}});
  const auto one_host = [](const char* host) {
    setenv("MASTER_ADDR", host, 1);
    return launched_by_environment()->one_host;
  };
  for (const char* host : {"localhost", "127.0.0.1", "127.0.1.1", "::1", "[::1]"}) {
    EXPECT_TRUE(one_host(host)) << host;
  }
  for (const char* host : {"node7", "10.0.0.7", "fd00::7", "127.example", "0.0.0.0"}) {
    EXPECT_FALSE(one_host(host)) << host;
  }
  set({{"LOCAL_WORLD_SIZE", "1"}});
  EXPECT_FALSE(one_host("node7"));
  set({{"LOCAL_WORLD_SIZE", "2"}});
  EXPECT_TRUE(one_host("node7"));
  setenv("MASTER_ADDR", "[fd00::7]", 1);
  EXPECT_EQ(launched_by_environment()->host, "fd00::7");
  SetUp();
  set({{"SLURM_PROCID", "3"}, {"SLURM_STEP_NUM_TASKS", "4"}, {"SLURM_JOB_ID", "12"}});
  for (const auto& [nodes, one] :
       {std::pair("gpu[003-004]", false), {"gpu1,gpu2", false}, {"gpu3", true}}) {
    set({{"SLURM_STEP_NODELIST", nodes}});
    EXPECT_EQ(launched_by_environment()->one_host, one) << nodes;
  }
}

TEST_F(Environment, SlurmStepWithoutHostsIsRefused) {
  set({{"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "2"}, {"SLURM_JOB_ID", "12"}});
  EXPECT_THROW(launched_by_environment(), InvalidArgument);
}

TEST_F(Environment, DistinguishesWorldsOfOneSecret) {
  set({{"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "2"}, {"SLURM_STEP_NODELIST", "a,b"}});
  set({{"SLURM_JOB_ID", "12"}, {"SLURM_STEP_ID", "0"}});
  const std::string first = launched_by_environment()->world;
  set({{"SLURM_STEP_ID", "1"}});
  EXPECT_NE(launched_by_environment()->world, first);
}

TEST_F(Environment, InvalidPortsAreNamed) {
  set({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "node7"}});
  const auto said = [] {
    try {
      launched_by_environment();
    } catch (const InvalidArgument& error) {
      return std::string(error.what());
    }
    return std::string("taken");
  };
  set({{"MASTER_PORT", "65535"}});
  EXPECT_EQ(launched_by_environment()->port, 65535);
  set({{"TORCHELASTIC_USE_AGENT_STORE", "True"}});  // the next is no port
  EXPECT_EQ(said(), "MASTER_PORT=65535: expected 1 to 65534");
  unsetenv("TORCHELASTIC_USE_AGENT_STORE");
  for (const std::string port : {"0", "65536", "-1", "99999999999", "http", ""}) {
    set({{"MASTER_PORT", port.c_str()}});
    EXPECT_EQ(said(), "MASTER_PORT=" + port + ": expected 1 to 65535");
  }
}

TEST_F(Environment, NodeListsBeginWithTheirFirstHost) {
  EXPECT_EQ(first_host("gpu1"), "gpu1");
  EXPECT_EQ(first_host("gpu1,gpu2"), "gpu1");
  EXPECT_EQ(first_host("gpu[01,05]"), "gpu01");
  EXPECT_EQ(first_host("gpu[12]"), "gpu12");
  EXPECT_EQ(first_host("rack[3-4]n[07,9]-ib,login"), "rack3n07-ib");
  EXPECT_EQ(first_host("10.77.0.[1-2]"), "10.77.0.1");
}

}  // namespace
}  // namespace tandem::test
