// Steps composed of measured costs, and their comparison with a run's phases.
#include "engine/plan/cost/measured_cost.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "engine/plan/cost/step_split.h"
#include "engine/plan/cost/utilization.h"

namespace tandem::plan {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

TrainConfig small_config() {
  TrainConfig config;
  config.model.layers = 8;
  config.train.batch = 8;
  config.train.microbatch = 1;
  return config;
}

MeasuredCosts some_costs() {
  return {.layer = {.forward = 1e-3,
                    .backward = 2e-3,
                    .gaps = 1e-4,
                    .tp = 3e-4,
                    .ep = 2e-4,
                    .update = 5e-4,
                    .dp = 4e-4},
          .ends = {.forward = 5e-4, .backward = 1e-3, .update = 1e-4, .dp = 1e-4},
          .transfer = 1e-4};
}

TEST(MeasuredCost, OneRankAddsLayersAndEnds) {
  TrainConfig config = small_config();
  const StepTime time =
      predict_step(config, {.layer = {.forward = 1, .backward = 2, .gaps = .5, .update = .25},
                            .ends = {.forward = 3, .backward = 4, .update = 10}});
  EXPECT_DOUBLE_EQ(time.compute, 8 * (8 * 3 + 7));
  EXPECT_DOUBLE_EQ(time.fixed, 8 * 8 * .5);
  EXPECT_DOUBLE_EQ(time.optimizer, 8 * .25 + 10);
  EXPECT_DOUBLE_EQ(time.total, 8 * (8 * 3.5 + 7) + 12);
}

TEST(MeasuredCost, BubbleIsThatOfTheSchedule) {
  TrainConfig config = small_config();
  config.parallel.pp = 4;
  const MeasuredCosts costs{.layer = {.forward = 1, .backward = 2}};
  const StepTime with_1f1b = predict_step(config, costs);
  EXPECT_DOUBLE_EQ(with_1f1b.bubble / with_1f1b.compute, 3.0 / 8);
  EXPECT_DOUBLE_EQ(with_1f1b.total, 8 * 2 * 3 * (1 + 3.0 / 8));
  config.parallel.schedule = "zb-h1";
  EXPECT_LT(predict_step(config, costs).total, with_1f1b.total);
  config.parallel.schedule = "interleaved";
  config.parallel.virtual_stages = 2;
  EXPECT_DOUBLE_EQ(predict_step(config, costs).bubble / with_1f1b.compute, 3.0 / 16);
}

TEST(MeasuredCost, SlowestStageSetsThePace) {
  TrainConfig config = small_config();
  config.parallel.pp = 2;
  const MeasuredCosts costs{.layer = {.forward = 1, .backward = 2}};
  EXPECT_DOUBLE_EQ(predict_step(config, costs).imbalance, 0);
  config.parallel.layers_per_stage = {5, 3};
  EXPECT_DOUBLE_EQ(predict_step(config, costs).imbalance, 8 * 3);
}

TEST(MeasuredCost, LastBucketOfGradientsIsNotHidden) {
  TrainConfig config = small_config();
  config.parallel.dp = 2;
  MeasuredCosts costs{.layer = {.forward = 1, .backward = 2, .dp = .5}};
  config.parallel.dp_bucket_mib = 1024;  // one bucket
  EXPECT_DOUBLE_EQ(predict_step(config, costs).exposed_dp, 8 * .5);
  config.parallel.dp_bucket_mib = 4.0 * double(config.model.parameters()) / (1 << 20) / 1.999;
  EXPECT_NEAR(predict_step(config, costs).exposed_dp, 2, .02);  // half of it, the rest is hidden
  costs.layer.dp = 500;  // more than the backward pass can hide
  EXPECT_NEAR(predict_step(config, costs).exposed_dp, 8 * 500 - 8 * 2, 2);
}

TEST(MeasuredCost, WaitsOfEveryMicrobatchForReplicasAreNotHidden) {
  TrainConfig config = small_config();
  config.parallel.dp = 2;
  const MeasuredCosts costs{.layer = {.forward = 1, .backward = 2, .dp_pass = .25},
                            .ends = {.dp_pass = .5}};
  EXPECT_DOUBLE_EQ(predict_step(config, costs).exposed_dp, 4 * (8 * .25 + .5));
}

TEST(MeasuredCost, SplitPassesAddUpAndSetTheBubble) {
  TrainConfig config = small_config();
  config.parallel.pp = 4;
  config.parallel.schedule = "zb-h1";
  const MeasuredCosts halves{.layer = {.forward = 1, .backward = 1, .weight_gradients = 1}};
  const MeasuredCosts whole{.layer = {.forward = 1, .backward = 2}};
  EXPECT_DOUBLE_EQ(predict_step(config, halves).total, predict_step(config, whole).total);
  // (p-1) (F + B - W)
  const MeasuredCosts unequal{.layer = {.forward = 1, .backward = 1.5, .weight_gradients = .5}};
  const StepTime time = predict_step(config, unequal);
  EXPECT_DOUBLE_EQ(time.bubble / time.compute, 3.0 * 2 / (8 * 3));
}

TEST(MeasuredCost, TermsAddUpForAllLayouts) {
  int tried = 0;
  for (const int64_t tp : {1, 2}) {
    for (const int64_t dp : {1, 2, 4}) {
      for (const int64_t pp : {1, 2, 4}) {
        for (const char* schedule : {"1f1b", "gpipe", "zb-h1"}) {
          TrainConfig config = small_config();
          config.parallel.tp = tp;
          config.parallel.dp = dp;
          config.parallel.pp = pp;
          config.parallel.schedule = schedule;
          const StepTime time = predict_step(config, some_costs());
          const StepSplit split = split_of(time);
          double sum = 0;
          for (const SplitTerm& term : split_terms()) {
            EXPECT_GE(split.*term.ms, 0) << term.name;
            sum += split.*term.ms;
          }
          EXPECT_NEAR(sum, split.step, 1e-9 * sum);
          EXPECT_EQ(split.pp > 0, pp > 1) << "tp " << tp << " dp " << dp;
          ++tried;
        }
      }
    }
  }
  EXPECT_EQ(tried, 54);
}

TEST(StepSplit, PhasesOfAStepAddUp) {
  PhaseTimes phases{};
  double sum = 0;
  for (size_t i = 0; i < kPhases; ++i) sum += phases[i] = double(i + 1);
  const StepSplit split = split_of(sum + 5, phases);
  double terms = 0;
  for (const SplitTerm& term : split_terms()) terms += split.*term.ms;
  EXPECT_DOUBLE_EQ(terms, sum + 5);
  EXPECT_DOUBLE_EQ(split.compute, 2 + 3 + 4);
  EXPECT_DOUBLE_EQ(split.pp, 8);
  EXPECT_DOUBLE_EQ(split.step_waits, 10);
  EXPECT_DOUBLE_EQ(split.other, 5 + 11);  // and checkpoints
}

TEST(StepSplit, NamesTheTermThatPartsMost) {
  const StepSplit predicted{.step = 100, .compute = 80, .tp = 15, .update = 5};
  StepSplit measured{.step = 130, .compute = 82, .tp = 42.5, .update = 5.5};
  EXPECT_THAT(describe_split(3, 22, measured, predicted),
              ElementsAre("self-check, steps 3 to 22: 130.00 ms a step, predicted 100.00 (30.0 % "
                          "longer)",
                          "  compute 82.00 ms, predicted 80.00; TP waits 42.50 ms, predicted "
                          "15.00; update 5.50 ms, predicted 5.00",
                          "  they part most in TP waits: +27.50 ms"));
  measured = predicted;
  measured.step = 99;
  EXPECT_THAT(describe_split(3, 22, measured, predicted),
              ElementsAre(HasSubstr("(1.0 % shorter)"), StartsWith("  compute")));
  const auto json = nlohmann::json::parse(split_json(3, 22, measured, predicted));
  EXPECT_EQ(json.at("first"), 3);
  EXPECT_EQ(json.at("measured_ms").at("step"), 99);
  EXPECT_EQ(json.at("predicted_ms").at("TP waits"), 15);
}

TEST(Utilization, ForgetsAMeasuredPeakThatARunExceeds) {
  Utilization measured{.flops_per_token = 1e6, .peak_flops = 1e9, .side = 512};
  EXPECT_FALSE(measured.check_peak(990));
  EXPECT_DOUBLE_EQ(measured.of(990), .99);
  const auto line = measured.check_peak(2110);
  ASSERT_TRUE(line);
  EXPECT_THAT(*line, HasSubstr("2.11 GFLOP/s, more than the peak of 1 that was measured"));
  EXPECT_EQ(measured.of(500), 0);
  EXPECT_FALSE(measured.check_peak(2110));
  Utilization rated{.flops_per_token = 1e6, .peak_flops = 1e9, .gpus = 1, .gpu = "H200"};
  EXPECT_FALSE(rated.check_peak(2110));
}

}  // namespace
}  // namespace tandem::plan
