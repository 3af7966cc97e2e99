#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "engine/config/config.h"
#include "engine/config/gpu_training.h"
#include "tandem/error.h"

namespace tandem {
namespace {

std::string check(const std::vector<std::string>& overrides) {
  try {
    check_config(parse_config("[data]\npaths = \"x\"\n", "j", overrides));
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "accepted";
}

TEST(ContextConfig, RanksMayHaveNoRows) {
  EXPECT_EQ(check({"train.seq=3", "parallel.cp=3"}), "accepted");
  EXPECT_EQ(check({"train.seq=3", "parallel.cp=4"}), "accepted");
  EXPECT_EQ(check({"train.seq=1", "parallel.cp=4"}), "accepted");
}

// Ranks have 10 and 8 tokens.
TEST(ContextConfig, HeadRowsDivideTheRowsOfEveryRank) {
  const auto with_rows = [](const std::string& rows) {
    return check({"train.batch=2", "train.seq=9", "parallel.cp=2", "train.head_rows=" + rows});
  };
  EXPECT_EQ(with_rows("2"), "accepted");
  EXPECT_EQ(
      with_rows("5"),
      "train.head_rows is 5: expected 0, or a divisor of the 8 tokens of a microbatch on index "
      "1 of parallel.cp = 2 that is a multiple of parallel.tp = 1");
}

TEST(ContextConfig, LearnersAreRefused) {
  EXPECT_EQ(check({"parallel.cp=2", "parallel.dp=2", "sync.method=local", "sync.learners=2",
                   "sync.every=2"}),
            "parallel.cp is 2 with sync.learners = 2: expected cp = 1");
}

TEST(ContextConfig, GpusAreRefused) {
  const std::vector<std::string> overrides{"parallel.cp=2"};
  try {
    check_gpu_training(load_config(TANDEM_SOURCE_DIR "/configs/gpu-moe.toml", overrides), false);
    ADD_FAILURE() << "accepted";
  } catch (const ConfigError& error) {
    EXPECT_STREQ(error.what(), "parallel.cp = 2: expected 1 on GPUs");
  }
}

}  // namespace
}  // namespace tandem
