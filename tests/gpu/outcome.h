// Exit codes of a GPU test program that tested nothing; never those of a pass.
#pragma once

#include <gtest/gtest.h>

#include <cstdio>

#include "tandem/cuda.h"

namespace tandem::test {

constexpr int kNothingTested = 1;  // no GPU, or no matching test
constexpr int kAllSkipped = 77;    // ctest's "skipped": the tests need more GPUs, or other kernels

inline bool has_gpu(const char* program) {
  if (gpu_count() > 0) return true;
  std::fprintf(stderr, "%s: no GPU: nothing is tested\n", program);
  return false;
}

/// Takes the result of RUN_ALL_TESTS.
inline int unless_all_skipped(const char* program, int status) {
  const testing::UnitTest& all = *testing::UnitTest::GetInstance();
  if (status != 0 || all.skipped_test_count() < all.test_to_run_count()) return status;
  std::fprintf(stderr, "%s: all %d tests were skipped: nothing is tested\n", program,
               all.test_to_run_count());
  return kAllSkipped;
}

}  // namespace tandem::test
