// Runs that predict their step time: on every layout, without a change of what they learn.
#include "engine/train/checks/self_check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "core/system/files.h"
#include "layouts.h"
#include "tandem/error.h"
#include "temp_dir.h"

namespace tandem {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using Overrides = std::vector<std::string>;

struct CheckedRun {
  std::string name, config;
  Layout layout{1, 1};
  Overrides overrides = {};
};

/// Log of the run.
std::string run_logged(const CheckedRun& run, const std::string& out, Overrides more) {
  Overrides overrides{"train.steps=23",   "model.hidden=16",    "model.ffn=32",
                      "model.head_dim=4", "train.seq=16",       "train.dtype=f32",
                      "train.batch=4",    "train.microbatch=1", "parallel.strategy=serial"};
  overrides.insert(overrides.end(), run.overrides.begin(), run.overrides.end());
  overrides.insert(overrides.end(), more.begin(), more.end());
  TrainRequest request = request_for(run.layout, out, overrides, run.config);
  const std::string path = out + ".log";
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> log(std::fopen(path.c_str(), "w"),
                                                            &std::fclose);
  request.log = log.get();
  run_on_threads(request);
  std::fflush(log.get());
  return read_file(path);
}

class SelfCheckedRuns : public ::testing::TestWithParam<CheckedRun> {};

TEST_P(SelfCheckedRuns, PredictTheirStepAndLearnTheSame) {
  const TempDir dir;
  const std::string with = dir / "with", without = dir / "without";
  EXPECT_THAT(run_logged(GetParam(), with, {}), HasSubstr("self-check, steps 3 to 22: "));
  EXPECT_THAT(run_logged(GetParam(), without, {"trace.ranks=false"}), Not(HasSubstr("self-check")));
  EXPECT_FALSE(path_exists(without + "/self_check.json"));
  EXPECT_TRUE(read_file(with + "/final/model.safetensors") ==
              read_file(without + "/final/model.safetensors"));
  const auto json = nlohmann::json::parse(read_file(with + "/self_check.json"));
  for (const char* side : {"predicted_ms", "measured_ms"}) {
    double sum = 0;
    for (const auto& [name, ms] : json.at(side).items()) sum += name == "step" ? 0 : double(ms);
    EXPECT_NEAR(sum, double(json.at(side).at("step")), 1e-6 * sum) << side;
    EXPECT_GT(double(json.at(side).at("compute")), 0) << side;
    EXPECT_GT(double(json.at(side).at("update")), 0) << side;
  }
  const bool waits = GetParam().name.starts_with("Stages");
  EXPECT_EQ(double(json.at("predicted_ms").at("PP waits")) > 0, waits);
  EXPECT_EQ(double(json.at("measured_ms").at("PP waits")) > 0, waits);
}

INSTANTIATE_TEST_SUITE_P(
    Layouts, SelfCheckedRuns,
    ::testing::Values(
        CheckedRun{"One", "tiny.toml"}, CheckedRun{"Tensors", "tiny.toml", {2, 1}},
        CheckedRun{"Replicas", "tiny.toml", {1, 2}},
        CheckedRun{"GradientWindow", "tiny.toml", {1, 2}, {"parallel.zero=2"}},
        CheckedRun{"LogicalReplicas", "tiny.toml", {1, 2}, {"parallel.replicas=4"}},
        CheckedRun{"Stages", "tiny.toml", {1, 1}, {"parallel.pp=2"}},
        CheckedRun{"StagesInV",
                   "tiny.toml",
                   {1, 1},
                   {"parallel.pp=2", "parallel.schedule=zb-v", "parallel.virtual_stages=2",
                    "model.layers=4", "model.tie_word_embeddings=false"}},
        CheckedRun{
            "Windows",
            "tiny.toml",
            {2, 1},
            {"model.sliding_window=8", "model.full_attention_freq=2", "train.recompute=full"}},
        CheckedRun{"Experts", "moe.toml", {1, 2}, {"parallel.ep=2", "model.moe_layer_freq=2"}},
        CheckedRun{"LossyGradients",
                   "tiny.toml",
                   {1, 2},
                   {"parallel.codec=gradients=int8,weights=int8", "optimizer.name=lamb"}}),
    [](const auto& checked) { return checked.param.name; });

TEST(SelfCheck, ShortRunsAreNotChecked) {
  const TempDir dir;
  const CheckedRun run{"Short", "tiny.toml"};
  EXPECT_THAT(run_logged(run, dir / "run", {"train.steps=21"}), Not(HasSubstr("self-check")));
}

}  // namespace
}  // namespace tandem
