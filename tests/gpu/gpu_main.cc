#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

#include "tests/gpu/outcome.h"
#include "tests/gpu/process_rank.h"

int main(int argc, char** argv) {
  // NCCL reads it at its first call, which adopt_test.cc makes as a caller.
  setenv("NCCL_NVLS_ENABLE", "0", 0);
  if (argc == 3 && std::string_view(argv[1]) == "--rank") {
    return tandem::test::run_as_rank(argv[2]);
  }
  testing::InitGoogleTest(&argc, argv);
  if (testing::GTEST_FLAG(list_tests)) return RUN_ALL_TESTS();
  if (!tandem::test::has_gpu("gpu_test")) return tandem::test::kNothingTested;
  const int status = RUN_ALL_TESTS();
  // A filter that matches nothing must not look like a pass.
  if (testing::UnitTest::GetInstance()->test_to_run_count() > 0) {
    return tandem::test::unless_all_skipped("gpu_test", status);
  }
  std::fprintf(stderr, "gpu_test: no test is called %s\n",
               std::string(testing::GTEST_FLAG(filter)).c_str());
  return tandem::test::kNothingTested;
}
