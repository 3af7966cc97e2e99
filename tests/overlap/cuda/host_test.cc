// Host work before and concurrent with the kernels. One GPU is enough for most of it.
#include <cuda_runtime_api.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <optional>
#include <stdexcept>
#include <string>

#include "comm/device/signal_kernels.h"
#include "tests/comm/processes/cuda/process_rank.h"
#include "tests/gpu/gpu_ranks.h"

namespace tandem::test {
namespace {

using namespace gpu;

class GpuHost : public OnGpus {};

constexpr size_t kMiB = size_t(1) << 20;

size_t free_memory() {
  size_t free = 0, all = 0;
  check(cudaMemGetInfo(&free, &all), "free memory");
  return free;
}

// Sets an environment variable for its lifetime.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) {
    if (const char* before = std::getenv(name)) before_ = before;
    setenv(name, value, 1);
  }
  ~Variable() {
    if (before_) {
      setenv(name_, before_->c_str(), 1);
    } else {
      unsetenv(name_);
    }
  }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  const char* name_;
  std::optional<std::string> before_;
};

TEST(GpuHostAlone, MulticastIsRejectedBeforeAnythingStarts) {
  const Variable multicast("NCCL_NVLS_ENABLE", "1");
  try {
    run_gpus({1, {}, 5}, [](Communicator&) { ADD_FAILURE() << "a rank has started"; });
    ADD_FAILURE() << "no error";
  } catch (const InvalidArgument& error) {
    EXPECT_STREQ(error.what(),
                 "NCCL_NVLS_ENABLE=1: expected 0, or not set: NVLink multicast stays off");
  }
}

TEST_P(GpuHost, OutOfMemoryIsReportedOnAllRanksAndRecoverable) {
  run([](GpuCommunicator& comm) {
    const size_t before = free_memory();
    for (int i = 0; i < 3; ++i) EXPECT_THROW(comm.allocate(size_t(1) << 46, 1), DeviceError);
    comm.barrier("all have failed");
    EXPECT_GE(free_memory() + 64 * kMiB, before);
    EXPECT_EQ(comm.allocate(1000, 1)->bytes(), 1000u);
  });
}

TEST_P(GpuHost, BufferDroppedByAnErrorIsFreedByLaterAllocations) {
  run([](GpuCommunicator& comm) {
    size_t before = 0;
    for (int i = 0; i < 20; ++i) {
      try {
        const auto buffer = comm.allocate(256 * kMiB, 1);
        throw std::runtime_error("on purpose");
      } catch (const std::runtime_error&) {
      }
      if (i == 0) before = free_memory();
    }
    comm.barrier("all have dropped theirs");
    EXPECT_GE(free_memory() + 512 * kMiB, before);
  });
}

// Runs the scenario in a child process.
int status_of_rank(const char* scenario) {
  const pid_t child = fork();
  if (child == 0) {
    execl("/proc/self/exe", "gpu_test", "--rank", scenario, nullptr);
    _exit(127);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

TEST(GpuHostAlone, KernelsAreLoadedBeforeTheFirstCallEvenIfCudaLoadsLazily) {
  if (gpu_count() == 0) GTEST_SKIP() << "needs a GPU";
  const Variable lazily("CUDA_MODULE_LOADING", "LAZY");
  EXPECT_EQ(status_of_rank("loaded"), kRight);
}

TEST(GpuHostAlone, SecondRunReusesTheAlgorithmsOfTheFirst) {
  if (gpu_count() == 0) GTEST_SKIP() << "needs a GPU";
  std::string folder = testing::TempDir() + "gemm_choices_XXXXXX";
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  {
    const Variable cache("TANDEM_CACHE_DIR", folder.c_str());
    EXPECT_EQ(status_of_rank("timed"), kRight);
    EXPECT_EQ(status_of_rank("kept"), kRight);
  }
  std::filesystem::remove_all(folder);
}

// A wait for an absent peer times out; then the world is aborted.
TEST_P(GpuHost, AbortDoesNotReplaceATimeout) {
  const auto body = [](GpuCommunicator& comm) {
    const auto buffer = std::static_pointer_cast<GpuBuffer>(comm.allocate(0, kMaxGpus));
    const DeviceMemory epoch(sizeof(uint64_t));
    PeerTable table;  // this rank and one that does not exist
    table.signals[0] = buffer->table().signals[comm.rank()];
    table.size = 2;
    comm.set_deadline(0.2);
    launch_wait(table, 0, 1, reinterpret_cast<uint64_t*>(epoch.data()), true,
                comm.device_deadline(), OpId::wait, comm.stream());
    check(cudaStreamSynchronize(comm.stream()), "the wait");
    comm.abort("on purpose");
    comm.synchronize();
  };
  try {
    run(body);
    ADD_FAILURE() << "no error";
  } catch (const Timeout& error) {
    EXPECT_EQ(error.peer, 1) << error.what();
  } catch (const Aborted& error) {
    ADD_FAILURE() << error.what();
  }
}

INSTANTIATE_TEST_SUITE_P(Gpu, GpuHost, testing::Values(1, 2, 4), gpus_name);

}  // namespace
}  // namespace tandem::test
