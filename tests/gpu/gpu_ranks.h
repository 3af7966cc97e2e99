// Runs a case on 1 to 8 GPU ranks (gpu_count.h).
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <functional>
#include <optional>
#include <string>
#include <string_view>

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
      // A wait within NCCL names the rank in its text, by the call that the rank is in.
      const std::string late = fmt::format("rank {} in ", ranks() - 1);
      EXPECT_TRUE(error.peer == ranks() - 1 ||
                  std::string_view(error.what()).find(late) != std::string_view::npos)
          << error.what();
      EXPECT_NE(error.rank, ranks() - 1);
      return error;
    }
    ADD_FAILURE() << "no error";
    return std::nullopt;
  }
};

}  // namespace tandem::test
