#include "core/nearest.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <limits>
#include <vector>

#include "core/env.h"
#include "core/files.h"
#include "core/machine.h"
#include "tandem/error.h"

namespace tandem {
namespace {

TEST(Nearest, EditDistance) {
  EXPECT_EQ(edit_distance("", ""), 0);
  EXPECT_EQ(edit_distance("abc", ""), 3);
  EXPECT_EQ(edit_distance("", "abc"), 3);
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3);
  EXPECT_EQ(edit_distance("steps", "stpes"), 1);
}

TEST(Nearest, FindsTypingMistakesAndNothingFarFetched) {
  const std::vector<std::string> known{"steps", "seed", "sequence", "dtype"};
  EXPECT_EQ(nearest("stpes", known), "steps");
  EXPECT_EQ(nearest("step", known), "steps");
  EXPECT_EQ(nearest("seq", known), "sequence");
  EXPECT_EQ(nearest("type", known), "dtype");
  EXPECT_EQ(nearest("momentum", known), "");
  EXPECT_EQ(nearest("", known), "");
  EXPECT_EQ(nearest("steps", {}), "");
}

TEST(Environment, DeadlinesThatNoClockCanHoldAreRefused) {
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

TEST(Environment, UnknownVariablesAreNamedWithWhatWasMeant) {
  ::setenv("TANDEM_DEADLINE", "3", 1);
  ::setenv("TANDEM_DEMO_SECONDS", "3", 1);
  ::setenv("TANDEM_TUNE", "1", 1);
  EXPECT_EQ(unknown_variables(),
            std::vector<std::string>{
                "TANDEM_DEADLINE is no variable of Tandem's: did you mean TANDEM_DEADLINE_S?"});
  ::unsetenv("TANDEM_DEADLINE");
  EXPECT_TRUE(unknown_variables().empty());
}

TEST(Files, ExistOrAreWritable) {
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

TEST(Machine, SaysSomethingTrue) {
  const Machine machine = this_machine();
  EXPECT_GE(machine.threads, 1);
  EXPECT_GT(machine.memory_bytes, 1u << 20);
  EXPECT_FALSE(machine.cpu.empty());
}

}  // namespace
}  // namespace tandem
