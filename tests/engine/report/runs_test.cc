#include "engine/report/runs.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "core/system/files.h"
#include "engine/plan/goal.h"
#include "engine/report/csv.h"
#include "engine/report/report.h"
#include "tandem/error.h"
#include "tests/error_of.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using testing::HasSubstr;

/// Two runs, `a` and `b`, in a folder that is the current one.
class ReportRuns : public testing::Test {
 protected:
  void SetUp() override {
    before_ = fs::current_path();
    folder_ = fs::temp_directory_path() / ("tandem_runs_test_" + std::to_string(::getpid()));
    fs::create_directories(folder_ / "a");
    fs::create_directories(folder_ / "b");
    fs::current_path(folder_);
    replace_file("a/config.toml", "[optimizer]\nlr = 0.001\n[train]\nseq = 32\n");
    replace_file("b/config.toml", "[optimizer]\nlr = 0.002\n[train]\nseq = 32\n");
    replace_file("a/started.json", R"({"command": "tandem train 'a b'", "commit": "abc"})");
    replace_file("a/metrics.jsonl",
                 R"({"step":1,"loss":3.5,"tokens":64,"step_ms":500,"exposed_ms":{"tp":1.25}})"
                 "\n"
                 R"({"step":2,"loss":null,"tokens":64,"step_ms":250,"note":"a \"b\", c"})"
                 "\n");
    replace_file("b/metrics.jsonl", R"({"step":1,"loss":12345678.25,"expert_rows":[[1]]})"
                                    "\n{\"step\":2,");
  }
  void TearDown() override {
    fs::current_path(before_);
    fs::remove_all(folder_);
  }

  fs::path before_, folder_;
};

TEST_F(ReportRuns, CurvesHaveTokensAndTimeUpToEachStep) {
  const report::RunGoal goal = read_run_goal(read_file("a/config.toml"));
  EXPECT_GT(goal.parameters, 0);
  const json run = report::describe_run("a/", report::read_metrics("a/metrics.jsonl"), goal);
  EXPECT_EQ(run.at("name"), "a");
  EXPECT_EQ(run.at("parameters"), goal.parameters);
  EXPECT_EQ(run.at("started").at("command"), "tandem train 'a b'");
  EXPECT_EQ(run.at("settings").at("optimizer.lr"), "0.001");
  EXPECT_EQ(run.at("series").at("tokens"), json({64, 128}));
  EXPECT_EQ(run.at("series").at("elapsed_s"), json({0.5, 0.75}));
  EXPECT_EQ(run.at("series").at("loss"), json({3.5, nullptr}));
}

TEST_F(ReportRuns, ReportOfSeveralNamesWhatDiffers) {
  replace_file("b/metrics.jsonl", "{\"step\":1,\"loss\":2,\"tokens_per_s\":10}\n");
  replace_file("b/config.toml", "[optimizer]\nlr = 0.002\n");
  const std::vector<fs::path> others{"b"};
  const std::string text = write_report("a", read_run_goal, others);
  std::string usual;  // of a key that only the other run has
  for (const report::RunSetting& each : read_run_goal(read_file("a/config.toml")).settings) {
    if (each.key == "train.seq") usual = each.usual;
  }
  EXPECT_THAT(text, HasSubstr("\n  optimizer.lr: 0.001 | 0.002\n"));
  EXPECT_THAT(text, HasSubstr("\n  train.seq: 32 | " + usual + "\n"));
  EXPECT_NE(usual, "32");
  const json compared = json::parse(read_file("a/summary.json")).at("compared");
  ASSERT_EQ(compared.at("runs").size(), 2u);
  EXPECT_EQ(compared.at("runs")[1].at("name"), "b");
  EXPECT_EQ(compared.at("runs")[1].at("final_loss"), 2);
  EXPECT_EQ(compared.at("settings").size(), 2u);
  write_report("a", read_run_goal);
  EXPECT_FALSE(json::parse(read_file("a/summary.json")).contains("compared"));
}

TEST_F(ReportRuns, FoldersThatCannotBeComparedAreRefused) {
  const std::vector<fs::path> same{"./a/"};
  EXPECT_THAT(error_of([&] { write_report("a", read_run_goal, same); }),
              HasSubstr("./a/ is given twice: expected different runs"));
  std::vector<fs::path> many;
  for (int i = 0; i < 17; ++i) many.emplace_back(std::to_string(i));
  EXPECT_THAT(error_of([&] { report::check_runs(many); }),
              HasSubstr("17 folders: expected at most 16"));
  const std::vector<fs::path> missing{"nowhere"};
  EXPECT_THAT(error_of([&] { write_report("a", read_run_goal, missing); }),
              HasSubstr("nowhere/metrics.jsonl"));
}

TEST_F(ReportRuns, CsvHasTheNumbersOfTheLog) {
  const std::vector<fs::path> one{"a"}, both{"a", "b"};
  EXPECT_EQ(report::steps_as_csv(one),
            "step,loss,tokens,step_ms,exposed_ms.tp,note\n"
            "1,3.5,64,500,1.25,\n"
            "2,,64,250,,\"a \"\"b\"\", c\"\n");
  EXPECT_EQ(report::steps_as_csv(both),
            "run,step,loss,tokens,step_ms,exposed_ms.tp,note\n"
            "a,1,3.5,64,500,1.25,\n"
            "a,2,,64,250,,\"a \"\"b\"\", c\"\n"
            "b,1,12345678.25,,,,\n");
  replace_file("b/metrics.jsonl", "\n");
  EXPECT_THAT(error_of([&] { report::steps_as_csv(both); }), HasSubstr("b/metrics.jsonl: no step"));
}

}  // namespace
}  // namespace tandem
