#include "tests/gpu/outcome.h"

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  return tandem::test::run_on_gpus("gpu_kernels_test");
}
