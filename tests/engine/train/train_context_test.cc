// Training runs of context-parallel ranks: they are those of one rank, and of other numbers of
// ranks.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "layouts.h"
#include "temp_dir.h"
#include "tests/engine/train/run_results.h"

namespace tandem {
namespace {

using Overrides = std::vector<std::string>;

Overrides with(Overrides all, const Overrides& more) {
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

/// Trains and returns its losses.
std::vector<double> train_losses(Layout layout, const std::string& out, const Overrides& overrides,
                                 const std::string& config = "tiny.toml") {
  run_on_threads(request_for(layout, out, overrides, config));
  return losses(out);
}

TEST(TrainContext, LossesAreThoseOfOneRank) {
  const TempDir dir;
  const Overrides steps{"train.steps=12"};
  const std::vector<double> expected = train_losses({1, 1}, dir / "one", steps);
  ASSERT_EQ(expected.size(), 12u);
  EXPECT_LT(expected.back(), expected.front());
  expect_close(train_losses({1, 1}, dir / "cp2", with(steps, {"parallel.cp=2"})), expected);
  expect_close(train_losses({2, 1}, dir / "cp3", with(steps, {"parallel.cp=3", "parallel.zero=2"})),
               expected);
}

// Some ranks have no tokens: of logits, of blocks of them, and of a gradient that a step's first
// microbatch stores.
TEST(TrainContext, RanksMayHaveNoTokens) {
  const TempDir dir;
  const Overrides steps{"train.steps=4", "train.seq=3", "train.microbatch=2"};
  const std::vector<double> expected = train_losses({1, 1}, dir / "one", steps);
  expect_close(train_losses({1, 1}, dir / "cp4", with(steps, {"parallel.cp=4"})), expected);
  expect_close(
      train_losses({2, 1}, dir / "rows", with(steps, {"parallel.cp=4", "train.head_rows=2"})),
      expected);
  const Overrides bf16{"parallel.cp=4", "train.dtype=bf16"};
  EXPECT_NEAR(train_losses({1, 1}, dir / "bf16", with(steps, bf16)).back(), expected.back(),
              1e-3 * expected.back());
}

// A checkpoint is of any number of context-parallel ranks: a run that resumes with another has the
// weights of one that never changed, to rounding.
TEST(TrainContext, CheckpointsResumeAtAnotherSize) {
  const TempDir dir;
  const Overrides base{"checkpoint.every=3", "optimizer.schedule=constant"};
  const std::vector<double> expected =
      train_losses({1, 2}, dir / "never", with(base, {"train.steps=6"}));
  train_losses({1, 2}, dir / "resumed", with(base, {"train.steps=3", "parallel.cp=2"}));
  TrainRequest resumed =
      request_for({1, 1}, dir / "resumed", with(base, {"train.steps=6", "parallel.cp=3"}));
  resumed.resume = true;
  run_on_threads(resumed);
  expect_close(losses(dir / "resumed"), expected);
}

// Fewer data-parallel ranks run the logical replicas of each context-parallel rank in turn.
TEST(TrainContext, ReplicasKeepTheirBitsOnFewerRanks) {
  const TempDir dir;
  const Overrides base{"train.steps=4", "parallel.cp=2", "parallel.replicas=4"};
  train_losses({1, 4}, dir / "four", base);
  train_losses({1, 2}, dir / "two", base);
  train_losses({1, 1}, dir / "one", base);
  EXPECT_EQ(final_weights(dir / "two"), final_weights(dir / "four"));
  EXPECT_EQ(final_weights(dir / "one"), final_weights(dir / "four"));
  for (const char* key : {"loss", "grad_norm"}) {
    const auto four = steps_of(dir / "four"), one = steps_of(dir / "one");
    for (size_t i = 0; i < four.size(); ++i) EXPECT_EQ(one.at(i).at(key), four.at(i).at(key)) << i;
  }
}

// Keys that the tests of data-parallel ranks cover, with context-parallel ones.
TEST(TrainContext, FormatsAndGroupsOfReplicasCompose) {
  const TempDir dir;
  const Overrides steps{"train.steps=12"};
  const auto last = [&](Layout layout, const std::string& name, const Overrides& more) {
    return train_losses(layout, dir / name, with(steps, more)).back();
  };
  const double expected = last({1, 1}, "one", {}), first = losses(dir / "one").front();
  const Overrides cp{"parallel.cp=2"};
  const auto expect_near = [&](const std::string& name, const Overrides& more, double tolerance) {
    EXPECT_NEAR(last({1, 2}, name, with(cp, more)), expected, tolerance * expected) << name;
  };
  ASSERT_LT(expected, 0.97 * first);
  expect_near("shards", {"parallel.dp_shard=1"}, 1e-4);
  expect_near("hosts", {"parallel.dp_host=1"}, 1e-4);
  expect_near("bf16", {"train.dtype=bf16"}, 1e-3);
  expect_near("gradients", {"parallel.codec=gradients=int8"}, 1e-3);
  expect_near("weights", {"parallel.codec=weights=int8"}, 1e-3);
  expect_near("keys", {"parallel.codec=keys=int8:g16"}, 1e-3);
  EXPECT_NE(losses(dir / "keys"), losses(dir / "shards")) << "keys are not rounded";
}

TEST(TrainContext, ValidationScoresWholeSequences) {
  const TempDir dir;
  const Overrides base{"train.steps=2", "data.val_fraction=0.4", "train.validate_every=2"};
  const auto validation_loss = [&](const std::string& name, const Overrides& more) {
    train_losses({1, 1}, dir / name, with(base, more));
    return steps_of(dir / name).back().at("validation_loss").get<double>();
  };
  const double expected = validation_loss("one", {});
  EXPECT_NEAR(validation_loss("cp", {"parallel.cp=2"}), expected, 1e-5 * expected);
}

TEST(TrainContext, SentBytesAndWaitsAreRecorded) {
  const TempDir dir;
  const Overrides base{"train.steps=2"};
  // The serial form computes once all keys have arrived, a message's latency after they are sent.
  train_losses(
      {1, 1}, dir / "cp",
      with(base, {"parallel.cp=2", "parallel.strategy=serial", "parallel.link=100MB/s,2ms"}));
  for (const nlohmann::json& step : steps_of(dir / "cp")) {
    EXPECT_GT(step.at("sent_bytes").at("cp"), 0);
    EXPECT_EQ(step.at("sent_bytes").at("tp"), 0);
    EXPECT_GT(step.at("exposed_ms").at("cp"), 0);
  }
  train_losses(
      {1, 1}, dir / "keys",
      with(base, {"parallel.cp=2", "parallel.strategy=serial", "parallel.codec=keys=int8:g16"}));
  EXPECT_LT(steps_of(dir / "keys")[0].at("sent_bytes").at("cp"),
            steps_of(dir / "cp")[0].at("sent_bytes").at("cp"));
  train_losses({1, 2}, dir / "dp", with(base, {"parallel.link=100GB/s,0us"}));
  for (const nlohmann::json& step : steps_of(dir / "dp")) {
    EXPECT_EQ(step.at("sent_bytes").at("cp"), 0);
    EXPECT_EQ(step.at("exposed_ms").at("cp"), 0);
  }
}

}  // namespace
}  // namespace tandem
