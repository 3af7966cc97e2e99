#include <gtest/gtest.h>

#include <cstdio>
#include <string>
#include <string_view>

#include "tests/gpu/process_rank.h"

int main(int argc, char** argv) {
  if (argc == 3 && std::string_view(argv[1]) == "--rank") {
    return tandem::test::run_as_rank(argv[2]);
  }
  testing::InitGoogleTest(&argc, argv);
  const int status = RUN_ALL_TESTS();
  // A filter that fits nothing must not look like a pass.
  if (testing::GTEST_FLAG(list_tests) ||
      testing::UnitTest::GetInstance()->test_to_run_count() > 0) {
    return status;
  }
  std::fprintf(stderr, "gpu_test: no test is called %s\n",
               std::string(testing::GTEST_FLAG(filter)).c_str());
  return 1;
}
