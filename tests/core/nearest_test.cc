#include "core/system/nearest.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <limits>
#include <new>
#include <string>
#include <vector>

#include "core/system/env.h"
#include "core/system/files.h"
#include "core/system/machine.h"
#include "core/system/output.h"
#include "core/system/printable.h"
#include "tandem/error.h"
#include "tandem/tensor.h"

namespace tandem {
namespace {

TEST(Nearest, EditDistanceCountsEdits) {
  EXPECT_EQ(edit_distance("", ""), 0);
  EXPECT_EQ(edit_distance("abc", ""), 3);
  EXPECT_EQ(edit_distance("", "abc"), 3);
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3);
  EXPECT_EQ(edit_distance("steps", "stpes"), 1);
}

TEST(Nearest, TextLongerThanAnyNameIsNotCompared) {
  const std::vector<std::string> known(50, "train.steps");
  const std::clock_t begin = std::clock();  // CPU time of this process, independent of other load
  EXPECT_EQ(nearest(std::string(10'000'000, 's'), known), "");
  EXPECT_LT(std::clock() - begin, 2 * CLOCKS_PER_SEC);
}

TEST(Printable, IsOneLineOfLimitedLength) {
  EXPECT_EQ(printable("a b"), "a b");
  EXPECT_EQ(printable("a\nb\t\x7f"), "a?b??");
  EXPECT_EQ(printable(std::string(200, 'x'), 5), "xxxxx... (200 bytes)");
  EXPECT_EQ(printable("\u00e4\u00e4\u00e4", 3), "\u00e4... (6 bytes)");  // no half character
  EXPECT_EQ(printable(""), "");
}

TEST(SingleLine, ContainsNoTerminalControlCharacters) {
  EXPECT_EQ(single_line("a\nb\tc\rd"), "a b c d");
  EXPECT_EQ(single_line("\x1b[2J\x07\x7f"), "?[2J??");
  EXPECT_EQ(single_line("\u009b31m \u00e4 \u20ac \U0001f600"), "?31m \u00e4 \u20ac \U0001f600");
  EXPECT_EQ(single_line("\x9b \xc3 \xed\xa0\x80 \xf4\x90\x80\x80 \xc0\x80 \xe2\x82"),
            "? ? ??? ???? ?? ??");
}

// A shell reads every quoted word as one argument with the same bytes, and the quoted text is
// printable.
TEST(ShellQuote, ShellReadsTheSameWord) {
  EXPECT_EQ(shell_quote("out/first-1.5_x"), "out/first-1.5_x");
  EXPECT_EQ(shell_quote("my run"), "'my run'");
  EXPECT_EQ(shell_quote(""), "''");
  for (const std::string word : {"~", "a b", "it's", "$(x) `y` \"z\" \\ !", "a\nb\x1b[1m'q'\\",
                                 "\xff\x80 \u00e4", "\u009b1'\\n", "*?[]{}#;&|<>", "-x=1"}) {
    const std::string quoted = shell_quote(word);
    EXPECT_EQ(single_line(quoted), quoted);
    std::FILE* shell = ::popen(("exec bash -c " + shell_quote("printf %s " + quoted)).c_str(), "r");
    ASSERT_NE(shell, nullptr);
    std::string read(100, '\0');
    read.resize(std::fread(read.data(), 1, read.size(), shell));
    ::pclose(shell);
    EXPECT_EQ(read, word) << quoted;
  }
}

TEST(Output, FullDeviceIsReported) {
  try {
    write_output("/dev/full", "text");
    FAIL() << "written";
  } catch (const IoError& error) {
    EXPECT_STREQ(error.what(), "/dev/full: cannot write: No space left on device");
  }
  EXPECT_NO_THROW(write_output("/dev/null", "text"));
}

TEST(OutOfMemory, NamesTheRequestedSize) {
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "a sanitizer ends the process";
#endif
  try {
    const Memory buffer(size_t(1) << 60);
    FAIL() << "allocated";
  } catch (const std::bad_alloc& error) {
    EXPECT_STREQ(error.what(), "1152921504606846976 bytes");
  }
}

TEST(Nearest, FindsTyposAndNothingFarFetched) {
  const std::vector<std::string> known{"steps", "seed", "sequence", "dtype"};
  EXPECT_EQ(nearest("stpes", known), "steps");
  EXPECT_EQ(nearest("step", known), "steps");
  EXPECT_EQ(nearest("seq", known), "sequence");
  EXPECT_EQ(nearest("type", known), "dtype");
  EXPECT_EQ(nearest("momentum", known), "");
  EXPECT_EQ(nearest("", known), "");
  EXPECT_EQ(nearest("steps", {}), "");
}

TEST(Environment, UnrepresentableDeadlinesAreRefused) {
  EXPECT_EQ(checked_deadline(0.5, "x"), 0.5);
  EXPECT_EQ(checked_deadline(1e9, "x"), 1e9);
  for (const double seconds : {0.0, -1.0, 1e-9, 1e10, std::numeric_limits<double>::infinity(),
                               std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_THROW(checked_deadline(seconds, "x"), InvalidArgument) << seconds;
    if (seconds != 0) {
      EXPECT_THROW(world_deadline(seconds), InvalidArgument) << seconds;
    }
  }
  EXPECT_EQ(world_deadline(0), env().deadline_s);
}

TEST(Environment, UnknownVariablesAreNamedWithASuggestion) {
  ::setenv("TANDEM_DEADLINE", "3", 1);
  ::setenv("TANDEM_DEMO_SECONDS", "3", 1);
  ::setenv("TANDEM_TUNE", "1", 1);
  EXPECT_EQ(unknown_variables(),
            std::vector<std::string>{
                "TANDEM_DEADLINE is no variable of Tandem's: did you mean TANDEM_DEADLINE_S?"});
  ::unsetenv("TANDEM_DEADLINE");
  EXPECT_TRUE(unknown_variables().empty());
}

TEST(Files, ExistenceAndWritabilityAreChecked) {
  const std::string dir = std::filesystem::temp_directory_path() / "tandem_files_test";
  std::filesystem::create_directories(dir);
  EXPECT_TRUE(path_exists(dir));
  EXPECT_FALSE(path_exists(dir + "/none"));
  EXPECT_FALSE(path_exists("/dev/null/none"));
  check_writable(dir + "/none");
  EXPECT_FALSE(path_exists(dir + "/none"));
  EXPECT_THROW(check_writable(dir), IoError);
  EXPECT_THROW(check_writable(dir + "/none/file"), IoError);
  std::filesystem::remove_all(dir);
}

TEST(Machine, PropertiesArePlausible) {
  const Machine machine = this_machine();
  EXPECT_GE(machine.threads, 1);
  EXPECT_GT(machine.memory_bytes, 1u << 20);
  EXPECT_FALSE(machine.cpu.empty());
}

}  // namespace
}  // namespace tandem
