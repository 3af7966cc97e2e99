// Exit codes of a GPU test program that tested nothing; never those of a pass.
#pragma once

#include <gtest/gtest.h>

#include <cstdio>
#include <string>

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

/// Runs the tests, once gtest is initialized; returns the exit status.
inline int run_on_gpus(const char* program) {
  if (testing::GTEST_FLAG(list_tests)) return RUN_ALL_TESTS();
  if (!has_gpu(program)) return kNothingTested;
  const int status = RUN_ALL_TESTS();
  // A filter that matches nothing must not look like a pass.
  if (testing::UnitTest::GetInstance()->test_to_run_count() > 0) {
    return unless_all_skipped(program, status);
  }
  std::fprintf(stderr, "%s: no test is called %s\n", program,
               std::string(testing::GTEST_FLAG(filter)).c_str());
  return kNothingTested;
}

}  // namespace tandem::test
