// Ranks as processes, started as torchrun does: on one node, on what NCCL takes for two nodes, with
// one that never starts, and with one that dies. They share the GPU of a machine that has one.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "core/system/env.h"
#include "tandem/cuda.h"
#include "tests/comm/processes/cuda/process_rank.h"
#include "tests/gpu/gpu_ranks.h"

namespace tandem::test {
namespace {

using Clock = std::chrono::steady_clock;

class Processes : public testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    if (!has_gpus_for(GetParam())) GTEST_SKIP() << "needs " << GetParam() << " GPUs";
    if (launched_by_mpi()) GTEST_SKIP() << "starts processes itself";
  }

  // Exit statuses of the `started` ranks. Those still running after `seconds` are killed: -SIGKILL.
  std::vector<int> start(const std::string& scenario, int started, int nodes, double seconds) {
    static int port = 24000 + int(getpid() % 4000);
    ++port;
    std::vector<pid_t> children;
    for (int rank = 0; rank < started; ++rank) {
      const pid_t child = fork();
      if (child == 0) {
        const auto set = [](const char* name, int value) {
          setenv(name, std::to_string(value).c_str(), 1);
        };
        set("RANK", rank);
        set("LOCAL_RANK", rank);
        set("WORLD_SIZE", GetParam());
        set("MASTER_PORT", port);
        setenv("MASTER_ADDR", "127.0.0.1", 1);
        if (nodes > 1) {
          setenv("NCCL_HOSTID", ("node" + std::to_string(rank * nodes / GetParam())).c_str(), 1);
        }
        execl("/proc/self/exe", "gpu_test", "--rank", scenario.c_str(), nullptr);
        _exit(127);
      }
      children.push_back(child);
    }
    std::vector<int> statuses;
    const auto until = Clock::now() + std::chrono::duration<double>(seconds);
    for (const pid_t child : children) {
      int status = 0;
      while (waitpid(child, &status, WNOHANG) == 0) {
        if (Clock::now() > until) kill(child, SIGKILL);
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
      }
      statuses.push_back(WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status));
    }
    return statuses;
  }

  std::vector<int> died_last() const {
    auto expected = std::vector<int>(size_t(GetParam()), kNamedTheLastRank);
    expected.back() = -SIGKILL;
    return expected;
  }
};

TEST_P(Processes, MatchReferenceAsThreadsDo) {
  EXPECT_EQ(start("work", GetParam(), 1, 90), std::vector<int>(size_t(GetParam()), kRight));
}

TEST_P(Processes, NcclMovesTheDataBetweenTwoNodes) {
  if (gpu_count() < GetParam()) GTEST_SKIP() << "one GPU is one node";
  EXPECT_EQ(start("work", GetParam(), 2, 90), std::vector<int>(size_t(GetParam()), kRight));
}

TEST_P(Processes, BackwardMatchesReferenceOnOneNodeAndOnTwo) {
  for (const int nodes : {1, 2}) {
    if (nodes > 1 && gpu_count() < GetParam()) break;  // one GPU is one node
    EXPECT_EQ(start("backward", GetParam(), nodes, 60),
              std::vector<int>(size_t(GetParam()), kRight))
        << nodes;
  }
}

TEST_P(Processes, AbsentRankIsNamed) {
  EXPECT_EQ(start("absent", GetParam() - 1, 1, 40),
            std::vector<int>(size_t(GetParam() - 1), kNamedTheLastRank));
}

TEST_P(Processes, DeadRankIsNamed) {
  EXPECT_EQ(start("die", GetParam(), 1, 60), died_last());
}

// The others' copy engines wait for flags written only by their own kernels, which do end.
TEST_P(Processes, DeadRankIsNamedWhileStreamsWaitForKernels) {
  if (env().gpu_portable) GTEST_SKIP() << "no fused kernels are allowed";
  EXPECT_EQ(start("die_fused", GetParam(), 1, 60), died_last());
}

TEST_P(Processes, RankThatDiesDuringNcclKernelsEndsTheOthers) {
  EXPECT_EQ(start("die_in_nccl", GetParam(), 1, 60), died_last());
}

TEST_P(Processes, IllegalAccessIsFinal) {
  EXPECT_EQ(start("lost_gpu", GetParam(), 1, 60), std::vector<int>(size_t(GetParam()), kRight));
}

INSTANTIATE_TEST_SUITE_P(Gpu, Processes, testing::Values(2, 4), gpus_name);

}  // namespace
}  // namespace tandem::test
