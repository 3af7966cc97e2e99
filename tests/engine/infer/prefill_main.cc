#include "tests/comm/ranks.h"

int main(int argc, char** argv) {
  return tandem::test::run_all_tests(argc, argv);
}
