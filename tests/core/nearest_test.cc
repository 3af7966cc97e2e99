#include "core/nearest.h"

#include <gtest/gtest.h>

#include <vector>

#include "core/machine.h"

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

TEST(Machine, SaysSomethingTrue) {
  const Machine machine = this_machine();
  EXPECT_GE(machine.threads, 1);
  EXPECT_GT(machine.memory_bytes, 1u << 20);
  EXPECT_FALSE(machine.cpu.empty());
}

}  // namespace
}  // namespace tandem
