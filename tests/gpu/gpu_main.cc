#include <gtest/gtest.h>

#include <string_view>

#include "tests/gpu/process_rank.h"

int main(int argc, char** argv) {
  if (argc == 3 && std::string_view(argv[1]) == "--rank") {
    return tandem::test::run_as_rank(argv[2]);
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
