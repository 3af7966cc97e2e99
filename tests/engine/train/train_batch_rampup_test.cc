// Batch ramp-up: every step has the bits of a run whose batch is that step's.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "core/system/files.h"
#include "engine/data/sampler.h"
#include "layouts.h"
#include "tandem/error.h"
#include "temp_dir.h"
#include "tests/engine/train/run_results.h"

namespace tandem {
namespace {

using Overrides = std::vector<std::string>;

constexpr int64_t kSteps = 7;
const std::vector<int64_t> kBatches{4, 4, 8, 12, 12, 12, 12};
const Overrides kRampup{"train.batch=12", "train.batch_start=4", "train.batch_increment=4",
                        "train.batch_rampup_samples=16"};

struct RampupCase {
  std::string config;
  Layout layout;
  Overrides overrides;
};

TrainRequest rampup_request(const RampupCase& c, const std::string& out,
                            const Overrides& more = kRampup) {
  Overrides overrides{"train.steps=" + std::to_string(kSteps),
                      "train.microbatch=1",
                      "train.seq=16",
                      "train.dtype=f32",
                      "parallel.strategy=serial",
                      "optimizer.warmup=2",
                      "checkpoint.keep=10"};
  overrides.insert(overrides.end(), c.overrides.begin(), c.overrides.end());
  overrides.insert(overrides.end(), more.begin(), more.end());
  return request_for(c.layout, out, overrides, c.config);
}

struct RunBits {
  std::string model, optimizer;
  std::vector<double> losses, norms, rates;
  std::vector<int64_t> batches, tokens;
  bool operator==(const RunBits&) const = default;
};

std::string newest_checkpoint(const std::string& out) {
  std::string newest;
  for (const auto& entry : std::filesystem::directory_iterator(out + "/checkpoints")) {
    newest = std::max(newest, entry.path().string());
  }
  return newest;
}

RunBits read_bits(const std::string& out) {
  const std::string checkpoint = newest_checkpoint(out);
  return {read_file(checkpoint + "/model.safetensors"),
          read_file(checkpoint + "/optimizer.safetensors"),
          values_of<double>(out, "loss"),
          values_of<double>(out, "grad_norm"),
          values_of<double>(out, "lr"),
          values_of<int64_t>(out, "batch"),
          values_of<int64_t>(out, "tokens")};
}

/// Runs to `end`, resuming if there are steps already.
void run_until(TrainRequest request, int64_t begin, int64_t end) {
  std::atomic<bool> stop = false;
  request.resume = begin > 0;
  if (end < kSteps) {
    request.stop = &stop;
    request.before_step = [&stop, end](int64_t step) { stop = step + 1 == end; };
  }
  EXPECT_EQ(run_on_threads(request).step, end);
}

const std::vector<RampupCase>& cases() {
  static const std::vector<RampupCase> cases{
      {"tiny.toml", {1, 2}, {}},
      {"tiny.toml", {1, 2}, {"optimizer.name=lamb", "parallel.codec=gradients=int8"}},
      {"tiny.toml", {1, 1}, {"parallel.pp=2"}},
      {"tiny.toml",
       {2, 1},
       {"parallel.pp=2", "parallel.schedule=interleaved", "parallel.virtual_stages=2",
        "model.layers=4", "model.tie_word_embeddings=false"}},
      {"tiny.toml",
       {1, 1},
       {"parallel.pp=2", "parallel.schedule=zb-v", "parallel.virtual_stages=2", "model.layers=4"}},
      {"moe.toml", {1, 2}, {"parallel.ep=2", "train.aux_loss_scope=step"}},
      {"moe.toml", {1, 2}, {"parallel.pp=2", "train.aux_loss_scope=step"}},
  };
  return cases;
}

std::string trace_of(const RampupCase& c) {
  return c.config + (c.overrides.empty() ? "" : " " + c.overrides.front());
}

TEST(BatchRampup, FollowsMegatronsFormula) {
  TrainConfig config;
  for (const auto& [start, increment, increments, samples] :
       {std::array<int64_t, 4>{4, 4, 2, 16}, {8, 8, 7, 1000}, {1, 1, 15, 100}, {2, 6, 1, 5}}) {
    config.train.batch_start = start;
    config.train.batch_increment = increment;
    config.train.batch_rampup_samples = samples;
    config.train.batch = start + increment * increments;
    for (int64_t sample = 0; sample < 2 * samples; ++sample) {
      int64_t passed = 0;
      while (passed < increments && sample * increments >= (passed + 1) * samples) ++passed;
      EXPECT_EQ(config.train.batch_at(sample), start + passed * increment) << sample;
    }
  }
  config.train.batch_start = 0;
  EXPECT_EQ(config.train.batch_at(0), config.train.batch);
}

void expect_bits_of_runs_with_each_batch(const RampupCase& c) {
  SCOPED_TRACE(trace_of(c));
  const TempDir dir;
  run_until(rampup_request(c, dir / "rampup"), 0, kSteps);
  for (size_t begin = 0; begin < kBatches.size();) {
    const int64_t batch = kBatches[begin];
    size_t end = begin;
    while (end < kBatches.size() && kBatches[end] == batch) ++end;
    run_until(rampup_request(c, dir / "batches", {"train.batch=" + std::to_string(batch)}),
              int64_t(begin), int64_t(end));
    begin = end;
  }
  const RunBits found = read_bits(dir / "rampup");
  EXPECT_EQ(found.batches, kBatches);
  EXPECT_TRUE(found == read_bits(dir / "batches"));
}

void expect_bits_of_undisturbed_run(const RampupCase& c) {
  SCOPED_TRACE(trace_of(c));
  const TempDir dir;
  run_until(rampup_request(c, dir / "whole"), 0, kSteps);
  // Stopped within a batch size, where it changes, and after the ramp-up.
  const int64_t stops[] = {0, 1, 3, 5, kSteps};
  for (size_t stop = 1; stop < std::size(stops); ++stop) {
    run_until(rampup_request(c, dir / "resumed"), stops[stop - 1], stops[stop]);
  }
  EXPECT_TRUE(read_bits(dir / "resumed") == read_bits(dir / "whole"));
}

TEST(BatchRampup, StepsHaveTheBitsOfRunsWithTheirBatch) {
  for (const size_t i : {1, 3, 6}) expect_bits_of_runs_with_each_batch(cases()[i]);
}

TEST(BatchRampup, ResumedRunHasTheBitsOfAnUndisturbedOne) {
  expect_bits_of_undisturbed_run(cases()[4]);
}

TEST(BatchRampupLong, StepsAndResumedRunsHaveTheBitsAtAllLayouts) {
  for (const RampupCase& c : cases()) {
    expect_bits_of_runs_with_each_batch(c);
    expect_bits_of_undisturbed_run(c);
  }
}

TEST(BatchRampup, EachSampleIsConsumedOnce) {
  const TempDir dir;
  const RampupCase c{"tiny.toml", {1, 2}, {}};
  const TrainRequest request = rampup_request(c, dir / "run");
  run_until(request, 0, kSteps);
  const Corpus corpus(request.config.data.paths, 0);
  const Sampler sampler(corpus, request.config.train.seq, uint64_t(request.config.train.seed));
  int64_t sample = 0;
  std::vector<int64_t> expected;
  for (const int64_t batch : kBatches) {
    int64_t tokens = 0;
    for (int64_t i = 0; i < batch; ++i) tokens += sampler.targets(sample++);
    expected.push_back(tokens);
  }
  EXPECT_EQ(values_of<int64_t>(dir / "run", "tokens"), expected);
  for (const nlohmann::json& step : steps_of(dir / "run")) {
    EXPECT_NEAR(step.at("tokens_per_s").get<double>(),
                step.at("tokens").get<double>() / step.at("step_ms").get<double>() * 1e3,
                1e-6 * step.at("tokens_per_s").get<double>());
  }
  const auto state =
      nlohmann::json::parse(read_file(newest_checkpoint(dir / "run") + "/state.json"));
  EXPECT_EQ(state.at("next_sample"), std::accumulate(kBatches.begin(), kBatches.end(), int64_t{0}));
}

TEST(BatchRampup, WrongKeysAreNamedBeforeAnythingRuns) {
  const TempDir dir;
  const struct {
    Overrides overrides;
    const char* message;
  } cases[] = {
      {{"train.batch_start=12"}, "train.batch_start is 12: expected less than train.batch = 12"},
      {{"train.batch_rampup_samples=0"},
       "train.batch_rampup_samples is 0: expected the samples over which the batch grows"},
      {{"train.microbatch=0"},
       "train.microbatch is 0: expected its size, which stays the same while the batch grows"},
      {{"train.batch_increment=0"},
       "train.batch_increment is 0: expected a divisor of train.batch - train.batch_start = 8"},
      {{"train.batch_increment=3"},
       "train.batch_increment is 3: expected a divisor of train.batch - train.batch_start = 8"},
      {{"train.batch_start=3", "train.batch_increment=9"},
       "train.batch_start is 3: expected a multiple of train.microbatch x parallel.dp = 2"},
      {{"train.batch=13", "train.batch_increment=9", "parallel.dp=1", "train.microbatch=13"},
       "train.batch_start is 4: expected a multiple of train.microbatch x parallel.dp = 13"},
      {{"train.batch_increment=1"},
       "train.batch_increment is 1: expected a multiple of train.microbatch x parallel.dp = 2"},
      {{"train.batch_start=0"},
       "train.batch_start is 0, no ramp-up: expected train.batch_increment and "
       "train.batch_rampup_samples to be 0"},
      {{"parallel.pp=2", "parallel.schedule=dualpipe-v", "parallel.virtual_stages=2",
        "model.layers=4"},
       "with a batch of 4 in the ramp-up: "},
      {{"parallel.pp=2", "parallel.schedule=interleaved", "parallel.virtual_stages=2",
        "model.layers=4", "train.batch_increment=2"},
       "with a batch of 6 in the ramp-up: "},
  };
  for (const auto& c : cases) {
    Overrides overrides = kRampup;
    overrides.insert(overrides.end(), c.overrides.begin(), c.overrides.end());
    const TrainRequest request = rampup_request({"tiny.toml", {1, 2}, {}}, dir / "run", overrides);
    TrainConfig config = request.config;
    for (const std::string& each : c.overrides) {
      if (each == "parallel.dp=1") config.parallel.dp = 1;  // the layout sets it
    }
    try {
      check_config(config);
      ADD_FAILURE() << "accepted: " << c.message;
    } catch (const ConfigError& error) {
      EXPECT_THAT(error.what(), ::testing::StartsWith(c.message));
      EXPECT_THAT(error.what(), ::testing::Not(::testing::HasSubstr("\n")));
    }
  }
}

}  // namespace
}  // namespace tandem
