#include <gtest/gtest.h>

#include <cstdlib>
#include <string_view>

#include "tests/comm/processes/cuda/process_rank.h"
#include "tests/gpu/outcome.h"

int main(int argc, char** argv) {
  // NCCL reads it at its first call, which adopt_test.cc makes as a caller.
  setenv("NCCL_NVLS_ENABLE", "0", 0);
  if (argc == 3 && std::string_view(argv[1]) == "--rank") {
    return tandem::test::run_as_rank(argv[2]);
  }
  testing::InitGoogleTest(&argc, argv);
  return tandem::test::run_on_gpus("gpu_test");
}
