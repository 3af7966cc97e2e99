#include <gtest/gtest.h>

#include "gemm/gemm.h"

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  tandem::set_kernel_threads(1);
  return RUN_ALL_TESTS();
}
