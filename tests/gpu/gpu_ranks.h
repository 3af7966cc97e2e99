// Runs a case on 1 to 8 GPU ranks (gpu_count.h).
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <optional>
#include <thread>

#include "comm/device/gpu_communicator.h"
#include "tandem/cuda.h"
#include "tests/gpu/gpu_count.h"

namespace tandem::test {

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
  /// Calls `make` on all ranks and the returned call on all but the last, which is in no call until
  /// another one has failed. Returns their Timeout, or nothing, with a failure recorded, if a wait
  /// ends otherwise.
  std::optional<Timeout> timeout_without_last(
      const std::function<std::function<void()>(gpu::GpuCommunicator&)>& make) {
    std::atomic<bool> one_has_failed = false;
    try {
      run(
          [&](gpu::GpuCommunicator& comm) {
            const std::function<void()> call = make(comm);
            comm.barrier("all are ready");
            if (comm.rank() + 1 == comm.size()) {
              for (int i = 0; i < 3000 && !one_has_failed; ++i) {
                std::this_thread::sleep_for(std::chrono::milliseconds(10));
              }
            } else {
              comm.set_deadline(0.5);
              try {
                call();
                comm.synchronize();
                ADD_FAILURE() << "the wait ended";
              } catch (const Error&) {
                one_has_failed = true;
                throw;
              }
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

}  // namespace tandem::test
