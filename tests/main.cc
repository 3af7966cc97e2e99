#include "init_tests.h"

int main(int argc, char** argv) {
  tandem::test::init_tests(&argc, argv);
  return RUN_ALL_TESTS();
}
