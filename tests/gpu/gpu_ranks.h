// Runs a case on 1 to 8 ranks, each on its own GPU. On a machine with one GPU all ranks share it,
// unless TANDEM_TEST_SHARED_GPU is set: 0 skips the case there, 1 shares the first GPU even if
// there are several.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <optional>
#include <string_view>

#include "comm/device/gpu_communicator.h"
#include "tandem/cuda.h"

namespace tandem::test {

/// 1 if every rank has its own GPU.
inline int ranks_per_gpu(int ranks) {
  return gpu_count() >= ranks ? 1 : ranks;
}
inline bool has_gpus_for(int ranks) {
  if (gpu_count() >= ranks) return true;
  const char* shared = std::getenv("TANDEM_TEST_SHARED_GPU");
  return shared ? gpu_count() > 0 && std::string_view(shared) != "0" : gpu_count() == 1;
}

class OnGpus : public testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    if (!has_gpus_for(GetParam())) GTEST_SKIP() << "needs " << GetParam() << " GPUs";
  }
  int ranks() const { return GetParam(); }
  void run(const std::function<void(gpu::GpuCommunicator&)>& body, double deadline_s = 20) {
    run_gpus({ranks(), {}, deadline_s, ranks_per_gpu(ranks())},
             [&](Communicator& comm) { body(gpu::as_gpu(comm)); });
  }
  /// Calls `make` on all ranks and the returned call on all but the last. Returns their Timeout, or
  /// nothing, with a failure recorded, if a wait ends otherwise.
  std::optional<Timeout> timeout_without_last(
      const std::function<std::function<void()>(gpu::GpuCommunicator&)>& make) {
    try {
      run(
          [&](gpu::GpuCommunicator& comm) {
            const std::function<void()> call = make(comm);
            comm.barrier("all are ready");
            if (comm.rank() + 1 != comm.size()) {
              comm.set_deadline(0.5);
              call();
              comm.synchronize();
              ADD_FAILURE() << "the wait ended";
            }
            comm.barrier("never reached by the others");
          },
          5);
    } catch (const Timeout& error) {
      EXPECT_EQ(error.peer, ranks() - 1);
      EXPECT_NE(error.rank, ranks() - 1);
      return error;
    }
    ADD_FAILURE() << "no error";
    return std::nullopt;
  }
};

inline std::string gpus_name(const testing::TestParamInfo<int>& info) {
  return "gpus" + std::to_string(info.param);
}

}  // namespace tandem::test
