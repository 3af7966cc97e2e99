// Runs a case on 1 to 4 GPUs, as many as there are; without one the test is skipped.
#pragma once

#include <gtest/gtest.h>

#include <functional>

#include "comm/nccl/nccl_communicator.h"

namespace tandem::test {

class OnGpus : public testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    if (gpu_count() < GetParam()) GTEST_SKIP() << "needs " << GetParam() << " GPUs";
  }
  int ranks() const { return GetParam(); }
  void run(const std::function<void(gpu::NcclCommunicator&)>& body, double deadline_s = 20) {
    run_gpus({ranks(), {}, deadline_s}, [&](Communicator& comm) { body(gpu::as_nccl(comm)); });
  }
};

inline std::string gpus_name(const testing::TestParamInfo<int>& info) {
  return "gpus" + std::to_string(info.param);
}

}  // namespace tandem::test
