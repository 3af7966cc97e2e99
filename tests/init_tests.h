// Tests of several files in one program, of which a run takes those of some files.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <string_view>

namespace tandem::test {

/// testing::InitGoogleTest. If the first of the other arguments is `--files=a_test.cc,b_test.cc`,
/// the program runs only the tests that these files define; ends it if there are none.
inline void init_tests(int* argc, char** argv) {
  constexpr std::string_view kFlag = "--files=";
  testing::InitGoogleTest(argc, argv);
  if (*argc < 2 || !std::string_view(argv[1]).starts_with(kFlag)) return;
  const std::string files = fmt::format(",{},", argv[1] + kFlag.size());
  std::string others;
  bool found = false;
  const testing::UnitTest& program = *testing::UnitTest::GetInstance();
  for (int s = 0; s < program.total_test_suite_count(); ++s) {
    const testing::TestSuite& suite = *program.GetTestSuite(s);
    for (int t = 0; t < suite.total_test_count(); ++t) {
      const testing::TestInfo& test = *suite.GetTestInfo(t);
      const std::string file = std::filesystem::path(test.file()).filename().string();
      if (files.find(fmt::format(",{},", file)) != std::string::npos) {
        found = true;
      } else {
        others += fmt::format(":{}.{}", suite.name(), test.name());
      }
    }
  }
  if (!found) {
    std::fprintf(stderr, "%s: no tests of these files\n", argv[1]);
    std::exit(2);
  }
  const std::string filter = GTEST_FLAG_GET(filter);
  GTEST_FLAG_SET(filter, filter + (filter.find('-') == std::string::npos ? "-" : "") + others);
}

}  // namespace tandem::test
