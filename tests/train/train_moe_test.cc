// Training of a model with experts on every layout, resumed at others, and what it reports.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>

#include "core/files.h"
#include "temp_dir.h"
#include "train/trainer.h"

namespace tandem {
namespace {

struct Layout {
  int tp, ep, dp;
};

TrainRequest request_for(const Layout& layout, const std::string& out,
                         const std::vector<std::string>& overrides = {}) {
  TrainRequest request;
  request.config = load_config(TANDEM_SOURCE_DIR "/configs/moe.toml", overrides);
  request.config.parallel.tp = layout.tp;
  request.config.parallel.ep = layout.ep;
  request.config.parallel.dp = layout.dp;
  request.out = out;
  return request;
}

void run(const TrainRequest& request) {
  check_config(request.config);
  const Corpus corpus(request.config.data.paths, request.config.data.heldout);
  WorldOptions options;
  options.ranks = int(request.config.parallel.tp * request.config.parallel.dp);
  run_threads(options, [&](Communicator& comm) { train(comm, request, corpus); });
}

std::vector<nlohmann::json> steps_of(const std::string& out) {
  std::istringstream lines(read_file(out + "/metrics.jsonl"));
  std::vector<nlohmann::json> steps;
  for (std::string line; std::getline(lines, line);) steps.push_back(nlohmann::json::parse(line));
  return steps;
}

/// Choices that differ: half of the sum of the differences of all counts, at least.
double flips_between(const nlohmann::json& a, const nlohmann::json& b) {
  double flips = 0;
  for (size_t layer = 0; layer < a.size(); ++layer) {
    for (size_t e = 0; e < a[layer].size(); ++e) {
      flips += std::abs(a[layer][e].get<double>() - b[layer][e].get<double>()) / 2;
    }
  }
  return flips;
}

/// Losses within 1e-5 until a choice differs: one of two experts whose scores are all but equal, as
/// sums are rounded in another order. From there on the runs are two, that learn as well.
void expect_same_run(const std::string& got, const std::string& want) {
  const auto a = steps_of(got), b = steps_of(want);
  ASSERT_EQ(a.size(), b.size());
  double flips = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double now = flips_between(a[i]["expert_rows"], b[i]["expert_rows"]);
    if (flips == 0 && now > 0) {
      std::printf("%s: %.0f flipped choices in step %zu\n", got.c_str(), now, i + 1);
      EXPECT_LE(now, 3);     // of 2,048 or more: next to nobody's scores are that close
      EXPECT_GE(i + 1, 5u);  // in the first steps rounding has not added up to anything
    }
    flips += now;
    const double loss = b[i]["loss"].get<double>();
    EXPECT_LE(std::abs(a[i]["loss"].get<double>() - loss), (flips > 0 ? 5e-3 : 1e-5) * loss)
        << "step " << i + 1 << " after " << flips << " flips";
  }
  std::printf("%s: %.0f flipped choices\n", got.c_str(), flips);
}

TEST(TrainMoe, FiftyLossesAgreeWithOneProcess) {
  const TempDir dir;
  run(request_for({1, 1, 1}, dir / "one"));
  const auto one = steps_of(dir / "one");
  ASSERT_EQ(one.size(), 50u);
  EXPECT_LT(one.back()["loss"].get<double>(), 0.75 * one.front()["loss"].get<double>());
  for (const Layout& layout :
       {Layout{1, 2, 2}, {1, 4, 4}, {2, 1, 1}, {2, 2, 2}, {1, 2, 4}, {4, 1, 1}}) {
    const std::string out = dir / fmt::format("tp{}ep{}dp{}", layout.tp, layout.ep, layout.dp);
    run(request_for(layout, out));
    expect_same_run(out, dir / "one");
  }
}

TEST(TrainMoe, MicrobatchesDoNotChangeTheAuxiliaryLoss) {
  const TempDir dir;
  run(request_for({1, 1, 1}, dir / "whole", {"train.steps=10", "model.aux_loss=0.1"}));
  run(request_for(
      {1, 2, 2}, dir / "parts",
      {"train.steps=10", "model.aux_loss=0.1", "train.microbatch=2", "parallel.bucket_mb=0.01"}));
  expect_same_run(dir / "parts", dir / "whole");
  const auto parts = steps_of(dir / "parts"), whole = steps_of(dir / "whole");
  EXPECT_NEAR(parts.back()["aux_loss"].get<double>(), whole.back()["aux_loss"].get<double>(), 1e-6);
}

TEST(TrainMoe, AnotherLayoutResumesFromWhatOneLeft) {
  const TempDir dir;
  const std::string out = dir / "run";
  const std::vector<std::string> overrides{"train.steps=30",       "checkpoint.every=10",
                                           "checkpoint.keep=3",    "model.shared_ffn=32",
                                           "model.bias_rate=1e-3", "model.router=sigmoid"};
  run(request_for({1, 1, 1}, dir / "one", overrides));
  run(request_for({1, 4, 4}, out, overrides));
  for (const auto& [layout, lost] : {std::pair(Layout{1, 2, 2}, "23"),
                                     {Layout{2, 2, 2}, "23"},
                                     {Layout{2, 1, 2}, "3"},
                                     {Layout{1, 8, 8}, "3"}}) {
    for (const char digit : std::string_view(lost)) {
      std::filesystem::remove_all(fmt::format("{}/checkpoints/step-000000{}0", out, digit));
    }
    TrainRequest request = request_for(layout, out, overrides);
    request.resume = true;
    run(request);
    expect_same_run(out, dir / "one");
  }
}

TEST(TrainMoe, SavingAtAnotherLayoutKeepsEveryBit) {
  const TempDir dir;
  const std::string out = dir / "run";
  run(request_for({1, 1, 1}, out, {"train.steps=3"}));
  const std::string model = read_file(out + "/checkpoints/step-00000003/model.safetensors");
  const std::string moments = read_file(out + "/checkpoints/step-00000003/optimizer.safetensors");
  TrainRequest request = request_for({2, 2, 2}, out, {"train.steps=3"});
  request.resume = true;
  run(request);
  EXPECT_EQ(read_file(out + "/checkpoints/step-00000003/model.safetensors"), model);
  EXPECT_EQ(read_file(out + "/checkpoints/step-00000003/optimizer.safetensors"), moments);
  EXPECT_EQ(read_file(out + "/final/model.safetensors"), model);
}

TEST(TrainMoe, ValidationIsTheSameOnEveryLayout) {
  const TempDir dir;
  const std::vector<std::string> overrides{"train.steps=4", "data.heldout=0.4",
                                           "train.validate_every=4"};
  run(request_for({1, 1, 1}, dir / "one", overrides));
  const double one = steps_of(dir / "one").back()["validation_loss"].get<double>();
  for (const Layout& layout : {Layout{1, 2, 2}, {1, 2, 4}, {2, 2, 2}}) {
    const std::string out = dir / fmt::format("v{}{}", layout.dp, layout.tp);
    run(request_for(layout, out, overrides));
    EXPECT_NEAR(steps_of(out).back()["validation_loss"].get<double>(), one, 1e-5 * one);
  }
}

TEST(TrainMoe, TwoRunsAreBitwiseEqual) {
  const TempDir dir;
  for (const char* name : {"a", "b"}) {
    run(request_for({2, 2, 2}, dir / name, {"train.steps=8", "train.microbatch=2"}));
  }
  EXPECT_EQ(read_file((dir / "a") + "/final/model.safetensors"),
            read_file((dir / "b") + "/final/model.safetensors"));
}

TEST(TrainMoe, LossFreeBalancingLevelsTheLoad) {
  const TempDir dir;
  // Mean over the last ten steps and all layers.
  const auto imbalance = [&](const char* name, const std::string& rate) {
    run(request_for({1, 1, 1}, dir / name,
                    {"model.aux_loss=0", "model.router=sigmoid", "model.bias_rate=" + rate}));
    const auto steps = steps_of(dir / name);
    double sum = 0;
    for (size_t i = steps.size() - 10; i < steps.size(); ++i) {
      for (const auto& layer : steps[i]["imbalance"]) sum += layer.get<double>() / 20;
    }
    return sum;
  };
  const double without = imbalance("without", "0"), with = imbalance("with", "0.005");
  std::printf("imbalance %.2f without, %.2f with the bias\n", without, with);
  EXPECT_LT(with, 0.8 * without);
}

TEST(TrainMoe, ExpertParallelLiesInsideDataParallel) {
  const auto refused = [](const Layout& layout) -> std::string {
    try {
      check_config(request_for(layout, "out").config);
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "no error";
  };
  EXPECT_EQ(refused({1, 2, 1}), "parallel.ep is 2: expected a divisor of parallel.dp = 1");
  EXPECT_EQ(refused({2, 3, 4}), "parallel.ep is 3: expected a divisor of parallel.dp = 4");
  EXPECT_EQ(refused({1, 8, 8}), "no error");
}

}  // namespace
}  // namespace tandem
