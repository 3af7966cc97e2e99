#include <stdlib.h>

#include <filesystem>

#include "tests/comm/ranks.h"

int main(int argc, char** argv) {
  // The tuner's choices of this run are stored in a separate directory.
  std::string cache = (std::filesystem::temp_directory_path() / "tandem_overlap_XXXXXX").string();
  if (!mkdtemp(cache.data())) return 1;
  setenv("TANDEM_CACHE_DIR", cache.c_str(), 1);
  const int code = tandem::test::run_all_tests(argc, argv);
  std::filesystem::remove_all(cache);
  return code;
}
