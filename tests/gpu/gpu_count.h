// Number of GPUs for a test of 1 to 8 ranks, each on its own GPU. On a machine with one GPU all
// ranks share it, unless TANDEM_TEST_SHARED_GPU is set: 0 skips the case there, 1 shares the first
// GPU even if there are several.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <string_view>

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

inline std::string gpus_name(const testing::TestParamInfo<int>& info) {
  return "gpus" + std::to_string(info.param);
}

}  // namespace tandem::test
