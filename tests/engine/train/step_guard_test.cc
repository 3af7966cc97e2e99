// Steps that are dropped, and ends of a run.
#include "engine/train/checks/step_guard.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "engine/checkpoint/run/run_end.h"
#include "engine/config/config.h"
#include "engine/optim/learning_rate.h"
#include "tandem/error.h"
#include "temp_dir.h"

namespace tandem {
namespace {

using ::testing::HasSubstr;

TrainConfig guard_config() {
  TrainConfig config;
  config.data.paths = {"x"};
  return config;
}

TEST(StepGuard, NonfiniteStepsAreSkippedWithinTheirBudget) {
  TrainConfig config = guard_config();
  ControlState state;
  const std::string stop = judge_step(config.train, config.optimizer.lr, state, 7, NAN, 1).reason;
  EXPECT_EQ(stop,
            "step 7: loss is nan, gradient norm 1: expected finite numbers (lower optimizer.lr = "
            "0.003)");
  config.train.skip_nonfinite = 2;
  for (const auto& [loss, norm] : {std::pair(double(NAN), 1.0), {1.0, HUGE_VAL}}) {
    const StepVerdict verdict = judge_step(config.train, config.optimizer.lr, state, 7, loss, norm);
    EXPECT_EQ(verdict.action, StepAction::skip);
    EXPECT_EQ(judge_step(config.train, config.optimizer.lr, state, 7, 2, 1).action,
              StepAction::update);
  }
  EXPECT_EQ(state.nonfinite_skips, 2);
  EXPECT_EQ(state.mean_steps, 2);
  EXPECT_EQ(state.mean_loss, 2);  // without those of dropped steps
  const ControlState before = state;
  const StepVerdict verdict = judge_step(config.train, config.optimizer.lr, state, 8, 1, NAN);
  EXPECT_EQ(verdict.action, StepAction::stop);
  EXPECT_EQ(verdict.reason,
            "step 8: loss is 1, gradient norm nan, after train.skip_nonfinite = 2 skipped steps: "
            "expected finite numbers (lower optimizer.lr = 0.003)");
  EXPECT_EQ(state, before);
}

TEST(StepGuard, SpikeIsALossFarAboveTheMeanOfThoseBefore) {
  TrainConfig config = guard_config();
  config.train.max_loss_spike = 2;
  config.train.skip_loss_spikes = 1;
  ControlState state;
  for (int i = 0; i < 10; ++i) {  // of the first ten none is a spike
    EXPECT_EQ(judge_step(config.train, config.optimizer.lr, state, i, i == 4 ? 55 : 5, 1).action,
              StepAction::update);
  }
  EXPECT_DOUBLE_EQ(state.mean_loss, 10);
  EXPECT_EQ(judge_step(config.train, config.optimizer.lr, state, 11, 20, 1).action,
            StepAction::update);
  const double mean = state.mean_loss;
  const StepVerdict skip = judge_step(config.train, config.optimizer.lr, state, 12, 2.01 * mean, 1);
  EXPECT_EQ(skip.action, StepAction::skip);
  EXPECT_THAT(skip.reason, HasSubstr(", 2.01 times the mean of those before"));
  EXPECT_EQ(state.mean_loss, mean);
  const StepVerdict stop = judge_step(config.train, config.optimizer.lr, state, 12, 30, 1);
  EXPECT_EQ(stop.action, StepAction::stop);
  EXPECT_EQ(stop.reason,
            "step 12: loss is 30, 2.75 times the mean of those before, after "
            "train.skip_loss_spikes = 1 skipped steps: expected at most train.max_loss_spike = 2");
  config.train.max_loss_spike = 0;
  EXPECT_EQ(judge_step(config.train, config.optimizer.lr, state, 12, 1e6, 1).action,
            StepAction::update);
}

TEST(StepGuard, MeanFollowsTheLossesOfAboutFiftySteps) {
  const TrainConfig config = guard_config();
  ControlState state;
  for (int i = 0; i < 50; ++i) judge_step(config.train, config.optimizer.lr, state, i, 8, 1);
  EXPECT_DOUBLE_EQ(state.mean_loss, 8);
  double expected = 8;
  for (int i = 0; i < 100; ++i) {
    judge_step(config.train, config.optimizer.lr, state, i, 2, 1);
    expected = expected * 49 / 50 + 2.0 / 50;
    EXPECT_NEAR(state.mean_loss, expected, 1e-12);
  }
}

TEST(RunEnd, StepsTokensTimeAndValidationEndARun) {
  TrainConfig config = guard_config();
  TrainState state;
  state.step = 999;
  EXPECT_EQ(describe_end(state, config.train), "");
  state.step = 1000;
  EXPECT_EQ(describe_end(state, config.train), "it has made 1000, train.steps is 1000");
  config.train.tokens = 5000;
  state.control.tokens = 4999;
  EXPECT_EQ(describe_end(state, config.train), "");
  state.control.tokens = 5100;
  EXPECT_EQ(describe_end(state, config.train), "it has consumed 5100 tokens, train.tokens is 5000");
  config.train.tokens = 0;
  config.train.seconds = 3;
  EXPECT_EQ(describe_end(state, config.train), "");
  state.elapsed_s = 3.25;
  EXPECT_EQ(describe_end(state, config.train), "it has trained for 3.2 s, train.seconds is 3");
}

TEST(RunEnd, EarlyStopCountsValidationsSinceTheLowest) {
  TrainConfig config = guard_config();
  config.train.early_stop = 2;
  TrainState state;
  const auto ends_after = [&](double loss) {
    add_validation(state.control, loss);
    return !describe_end(state, config.train).empty();
  };
  for (const double loss : {double(NAN), double(NAN), 3.0, 3.0, 2.5, 2.6, 2.4, 2.4}) {
    EXPECT_FALSE(ends_after(loss)) << loss;
  }
  EXPECT_TRUE(ends_after(NAN));
  EXPECT_EQ(describe_end(state, config.train),
            "none of the last 2 validation losses is below 2.4000, train.early_stop is 2");
  config.train.early_stop = 3;  // a resumed run may go on
  EXPECT_EQ(describe_end(state, config.train), "");
  config.train.early_stop = 0;
  EXPECT_FALSE(ends_after(9));
}

TEST(RunControl, KeysMustBeConsistent) {
  const auto check = [](const std::vector<std::string>& overrides) -> std::string {
    try {
      check_config(parse_config("[data]\npaths = \"x\"\n", "j", overrides));
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "accepted";
  };
  EXPECT_EQ(check({"train.tokens=5", "train.seconds=2.5"}),
            "train.tokens is 5 and train.seconds is 2.5: expected one of them");
  EXPECT_THAT(check({"train.early_stop=3"}),
              HasSubstr("train.early_stop is 3: expected train.validate_every above 0"));
  EXPECT_THAT(check({"train.max_loss_spike=0.5"}),
              HasSubstr("train.max_loss_spike is 0.5: expected 0, or a ratio above 1"));
  EXPECT_THAT(check({"train.skip_loss_spikes=1"}),
              HasSubstr("train.skip_loss_spikes is 1: expected train.max_loss_spike"));
  EXPECT_EQ(check({"train.skip_loss_spikes=1", "train.max_loss_spike=1.5", "train.tokens=5",
                   "train.max_seconds=7", "train.skip_nonfinite=3"}),
            "accepted");
}

TEST(LearningRate, FollowsTheTokensThatEndARun) {
  TrainConfig config = guard_config();
  config.train.steps = 1;  // ignored
  config.train.tokens = 1000;
  config.optimizer.schedule = "linear";
  config.optimizer.warmup = 4;
  config.optimizer.lr = 1;
  config.optimizer.min_lr = 0;
  EXPECT_DOUBLE_EQ(learning_rate(config.optimizer, config.train, 1, 100, 0), 0.5);
  EXPECT_DOUBLE_EQ(learning_rate(config.optimizer, config.train, 4, 200, 200), 1);
  EXPECT_DOUBLE_EQ(learning_rate(config.optimizer, config.train, 9, 600, 200), 0.5);
  EXPECT_DOUBLE_EQ(learning_rate(config.optimizer, config.train, 12, 1200, 200), 0);
}

}  // namespace
}  // namespace tandem
