// Trainings whose steps are dropped, and that end by tokens, by validation losses or by time.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <span>
#include <sstream>
#include <string_view>
#include <variant>

#include "core/formats/safetensors.h"
#include "core/host_copy.h"
#include "core/system/files.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/data/ledger/ledger_check.h"
#include "engine/data/ledger/ledger_lines.h"
#include "engine/data/sampler.h"
#include "engine/train/model_ranks.h"
#include "engine/train/step_executor.h"
#include "gemm/gemm.h"
#include "layouts.h"
#include "tandem/error.h"
#include "tandem/random.h"
#include "temp_dir.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;
using Overrides = std::vector<std::string>;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int64_t kBatch = 4, kSeq = 16;
const Overrides kSmall{"train.seq=16",       "train.batch=4",
                       "train.microbatch=1", "model.layers=2",
                       "model.hidden=16",    "model.ffn=32",
                       "model.head_dim=4",   "train.dtype=f32",
                       "optimizer.warmup=2", "parallel.strategy=serial",
                       "optimizer.lr=0.05",  "optimizer.min_lr=0.01"};

TrainRequest control_request(const std::string& out, Overrides overrides,
                             const std::string& config = "tiny.toml") {
  overrides.insert(overrides.begin(), kSmall.begin(), kSmall.end());
  TrainRequest request = request_for({1, 1}, out, overrides, config);
  const TrainConfig parsed = load_config(TANDEM_SOURCE_DIR "/configs/" + config, overrides);
  request.config.parallel.tp = parsed.parallel.tp;
  request.config.parallel.dp = parsed.parallel.dp;
  request.resume = true;
  return request;
}

/// A text of one letter, with random bytes in the windows of the samples [begin, end).
void write_spike(const std::string& path, int64_t begin, int64_t end) {
  std::string text(200 * kSeq, 'x');
  write_bytes(path, text);
  const Corpus corpus(Overrides{path}, 0);
  const Sampler sampler(corpus, kSeq, 1);
  for (int64_t sample = begin; sample < end; ++sample) {
    const int64_t window = sampler.window(sample) * kSeq;
    for (int64_t i = std::max<int64_t>(1, window); i < window + kSeq; ++i) {
      text[size_t(i) - 1] = char(philox(1, 0, uint64_t(i))[0]);  // the first token is no byte
    }
  }
  write_bytes(path, text);
}

/// Copies a run with one checkpoint, whose next sample is then `next`.
void copy_run(const std::string& from, const std::string& to, int64_t step, int64_t next) {
  fs::create_directories(to + "/checkpoints");
  fs::copy(checkpoint_path(from, step), checkpoint_path(to, step));
  StoredState stored = read_stored_state(checkpoint_path(to, step));
  const ModelConfig model = verify_checkpoint(checkpoint_path(to, step)).model;
  stored.state.next_sample = next;
  stored.files.erase("config.json");
  write_state(checkpoint_path(to, step), stored.state, model, stored.files);
}

void expect_equal_checkpoints(const std::string& a, const std::string& b) {
  int compared = 0;
  for (const std::string& name : names_in(a)) {
    if (!name.ends_with(".safetensors")) continue;
    EXPECT_TRUE(read_file(a + "/" + name) == read_file(b + "/" + name)) << name;
    ++compared;
  }
  EXPECT_GE(compared, 2);
}

struct SkipCase {
  std::string name, config;
  Overrides overrides;
};
class DroppedStep : public ::testing::TestWithParam<SkipCase> {};

// A run that drops step 13 against one that begins after its samples.
TEST_P(DroppedStep, LeavesTheBitsOfARunWithoutItsSamples) {
  const TempDir dir;
  const std::string text = dir / "text", out = dir / "out";
  write_spike(text, 12 * kBatch, 13 * kBatch);
  Overrides overrides{"data.paths=" + text, "train.steps=15", "checkpoint.every=12",
                      "train.max_loss_spike=1.5", "train.skip_loss_spikes=1"};
  overrides.insert(overrides.end(), GetParam().overrides.begin(), GetParam().overrides.end());
  TrainRequest request = control_request(out, overrides, GetParam().config);
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> log(std::tmpfile(), &std::fclose);
  request.log = log.get();
  EXPECT_FALSE(run_on_threads(request).stopped);
  std::string notes(size_t(std::ftell(log.get())), '\0');
  std::rewind(log.get());
  notes.resize(std::fread(notes.data(), 1, notes.size(), log.get()));
  EXPECT_THAT(notes, HasSubstr("step 13: loss is "));
  EXPECT_THAT(notes, HasSubstr(": dropped, samples 48 to 51 of epoch 0 are skipped"));

  copy_run(out, dir / "other", 12, 13 * kBatch);
  run_on_threads(control_request(dir / "other", overrides, GetParam().config));
  expect_equal_checkpoints(checkpoint_path(out, 15), checkpoint_path(dir / "other", 15));
  EXPECT_TRUE(read_file(out + "/final/model.safetensors") ==
              read_file(dir / "other/final/model.safetensors"));

  EXPECT_EQ(losses(out).size(), 15u);
  const TrainState state = read_train_state(out + "/final");
  EXPECT_EQ(state.control.spike_skips, 1);
  EXPECT_EQ(state.control.tokens, 16 * kBatch * kSeq);
  const std::vector<ConsumedSamples> saved{{"final", state.step, state.next_sample}};
  const LedgerCheck check = check_ledger(out + "/ledger.jsonl", saved);
  EXPECT_THAT(check.problems, ElementsAre());
  EXPECT_EQ(check.skipped_samples, kBatch);
  EXPECT_EQ(check.next_sample, 16 * kBatch);
}

INSTANTIATE_TEST_SUITE_P(
    All, DroppedStep,
    ::testing::Values(SkipCase{"adamw", "tiny.toml", {"parallel.dp=2", "parallel.tp=2"}},
                      SkipCase{"wires",
                               "tiny.toml",
                               {"parallel.dp=2", "parallel.codec=gradients=int4:g32,weights=int8"}},
                      SkipCase{"bf16", "tiny.toml", {"parallel.dp=2", "train.dtype=bf16"}},
                      SkipCase{"every_pass",
                               "tiny.toml",
                               {"parallel.dp=2", "parallel.zero=2", "train.microbatch=1",
                                "parallel.codec=gradients=int4:g32"}},
                      SkipCase{"lamb_stages",
                               "tiny.toml",
                               {"parallel.dp=2", "parallel.pp=2", "optimizer.name=lamb",
                                "optimizer.lr=0.2", "parallel.codec=gradients=int4:g32"}},
                      SkipCase{
                          "experts",
                          "moe.toml",
                          {"parallel.dp=2", "parallel.ep=2", "model.router_bias_update_rate=0.01",
                           "train.aux_loss_scope=step"}}),
    [](const auto& each) { return each.param.name; });

TEST(TrainControl, SpikeBeyondTheBudgetSavesAndStops) {
  const TempDir dir;
  write_spike(dir / "text", 12 * kBatch, 13 * kBatch);
  const TrainRequest request = control_request(
      dir / "out", {"data.paths=" + dir / "text", "train.steps=15", "train.max_loss_spike=1.5"});
  try {
    run_on_threads(request);
    ADD_FAILURE() << "trained";
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), HasSubstr("step 13: loss is "));
    EXPECT_THAT(error.what(), HasSubstr("expected at most train.max_loss_spike = 1.5; ended after "
                                        "step 12, saved " +
                                        checkpoint_path(dir / "out", 12)));
  }
  const TrainState state = read_train_state(checkpoint_path(dir / "out", 12));
  EXPECT_EQ(state.next_sample, 12 * kBatch);
}

TEST(TrainControl, NonfiniteStepsAreSkippedAndThenStopTheRun) {
  const TempDir dir;
  const TrainRequest request = control_request(
      dir / "out", {"train.steps=50", "train.skip_nonfinite=2", "optimizer.lr=1000",
                    "checkpoint.every=1", "checkpoint.keep=1", "optimizer.schedule=constant",
                    "optimizer.warmup=0", "optimizer.grad_clip=0", "optimizer.weight_decay=1000"});
  try {
    run_on_threads(request);
    ADD_FAILURE() << "trained";
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), HasSubstr(", after train.skip_nonfinite = 2 skipped steps: expected "
                                        "finite numbers"));
  }
  const std::vector<std::string> checkpoints = list_checkpoints(dir / "out");
  ASSERT_EQ(checkpoints.size(), 1u);
  const TrainState state = read_train_state(checkpoints[0]);
  EXPECT_EQ(state.control.nonfinite_skips, 2);
  EXPECT_EQ(state.next_sample, (state.step + 2) * kBatch);
  const std::vector<ConsumedSamples> saved{{"last", state.step, state.next_sample}};
  const LedgerCheck check = check_ledger(dir / "out/ledger.jsonl", saved);
  EXPECT_THAT(check.problems, ElementsAre());
  EXPECT_EQ(check.skipped_steps, 2);
}

/// Steps of a model with a step between whose weights, and so whose gradients, are not numbers:
/// weights, moments and residuals at the end, by rank.
std::vector<std::vector<float>> train_steps(const TrainConfig& config, const Corpus& corpus,
                                            bool with_dropped_step) {
  std::vector<std::vector<float>> states(size_t(ParallelDims(config.parallel).ranks()));
  run_threads({.ranks = ParallelDims(config.parallel).ranks()}, [&](Communicator& world) {
    const ParallelGroups groups(world, ParallelDims(config.parallel), config.model.experts > 0);
    const Sampler sampler(corpus, kSeq, 1);
    ModelRanks ranks(groups, config, {});
    StepExecutor executor(config.train, config.parallel, groups, corpus, sampler, ranks);
    for (ModelChunk& chunk : ranks.chunks) {
      chunk.stage.initialize(1);
      chunk.optimizer.adopt_weights(chunk.stage.parameter_staging());
    }
    executor.weights_changed();
    for (int64_t step = 0; step < 4; ++step) {
      if (step == 2 && with_dropped_step) {
        executor.await_weights();
        const Tensor weights = ranks.chunks[0].stage.parameters();
        const std::span<float> values(weights.as<float>(), size_t(weights.elements()));
        const std::vector<float> saved(values.begin(), values.end());
        std::ranges::fill(values, NAN);
        EXPECT_TRUE(std::isnan(executor.compute(100 * kBatch, kBatch * kSeq).squares));
        std::ranges::copy(saved, values.begin());
      }
      executor.compute(step * kBatch, kBatch * kSeq);
      executor.update(AdamStep::make(config.optimizer, step, 1e-2, 1));
    }
    executor.await_weights();
    std::vector<float>& state = states[size_t(world.rank())];
    const auto add = [&](const Tensor& tensor) {
      const std::span values = host_values(tensor);
      state.insert(state.end(), values.begin(), values.end());
    };
    for (ModelChunk& chunk : ranks.chunks) {
      for (const Moment moment : {Moment::weights, Moment::first, Moment::second}) {
        for (const StateSlice& slice : chunk.optimizer.slices(moment)) {
          add(slice.values);
        }
      }
      for (const Tensor& residual : chunk.optimizer.residuals()) add(residual);
    }
  });
  return states;
}

TEST(TrainControl, GradientsThatAreNoNumbersLeaveNoTrace) {
  for (const std::string codec : {"none", "gradients=int4:g32", "gradients=int8,weights=int8"}) {
    TrainConfig config = control_request("", {"parallel.dp=2", "parallel.codec=" + codec}).config;
    const Corpus corpus(config.data.paths, 0);
    const auto states = train_steps(config, corpus, false);
    EXPECT_TRUE(train_steps(config, corpus, true) == states) << codec;
    EXPECT_TRUE(std::ranges::all_of(states[0], [](float x) { return std::isfinite(x); }));
  }
}

TEST(TrainControl, RunByTokensHasTheBitsOfOneByTheSameSteps) {
  const TempDir dir;
  run_on_threads(control_request(dir / "steps", {"train.steps=9"}));
  const std::string tokens = "train.tokens=" + std::to_string(9 * kBatch * kSeq - 1);
  const Overrides by_tokens{"train.tokens=" + std::to_string(9 * kBatch * kSeq), "train.steps=3"};
  EXPECT_EQ(run_on_threads(control_request(dir / "tokens", by_tokens)).step, 9);
  EXPECT_TRUE(read_file(dir / "steps/final/model.safetensors") ==
              read_file(dir / "tokens/final/model.safetensors"));
  EXPECT_EQ(run_on_threads(control_request(dir / "less", {tokens})).step, 9);
  // Resumed from a checkpoint that does not have its tokens, as those of earlier versions.
  TrainRequest first = control_request(dir / "resumed", by_tokens);
  std::atomic<bool> stop = false;
  first.stop = &stop;
  first.before_step = [&](int64_t step) { stop = step >= 4; };
  EXPECT_TRUE(run_on_threads(first).stopped);
  EXPECT_EQ(run_on_threads(control_request(dir / "resumed", by_tokens)).step, 9);
  EXPECT_TRUE(read_file(dir / "steps/final/model.safetensors") ==
              read_file(dir / "resumed/final/model.safetensors"));
}

TEST(TrainControl, RunEndsEarlyIfTheValidationLossNoLongerFalls) {
  const TempDir dir;
  const Overrides overrides{
      "train.steps=100", "train.validate_every=2", "data.val_fraction=0.3",   "train.early_stop=3",
      "optimizer.lr=0",  "optimizer.min_lr=0",     "train.validate_bytes=500"};
  TrainRequest first = control_request(dir / "out", overrides);
  std::atomic<bool> stop = false;
  first.stop = &stop;
  first.before_step = [&](int64_t step) { stop = step >= 4; };
  EXPECT_TRUE(run_on_threads(first).stopped);  // after two validations
  const TrainEnd end = run_on_threads(control_request(dir / "out", overrides));
  EXPECT_FALSE(end.stopped);
  EXPECT_EQ(end.step, 8);  // the first validation, at step 2, has the lowest loss
  EXPECT_TRUE(path_exists(dir / "out/final/model.safetensors"));
}

TEST(TrainControl, ProcessStopsAfterItsTimeAndIsResumed) {
  const TempDir dir;
  const Overrides limit{"train.steps=1000000", "train.max_seconds=0.3", "parallel.dp=2"};
  const TrainEnd end = run_on_threads(control_request(dir / "out", limit));
  EXPECT_TRUE(end.stopped);
  EXPECT_GE(end.step, 1);
  EXPECT_TRUE(path_exists(checkpoint_path(dir / "out", end.step)));
  const std::string steps = "train.steps=" + std::to_string(end.step + 2);
  EXPECT_EQ(run_on_threads(control_request(dir / "out", {steps, "parallel.dp=2"})).step,
            end.step + 2);
}

/// Copies a model with its embedding times `factor`.
void scale_embedding(const std::string& from, const std::string& to, float factor) {
  fs::create_directories(to);
  fs::copy(from + "/config.json", to + "/config.json");
  const SafetensorsFile file(from + "/model.safetensors");
  std::vector<SafetensorsWriter::Spec> specs;
  for (const SafetensorsEntry& entry : file.entries()) {
    specs.push_back({entry.name, entry.dtype, entry.shape});
  }
  SafetensorsWriter writer(to + "/model.safetensors", specs);
  for (const SafetensorsEntry& entry : file.entries()) {
    std::vector<float> values(size_t(entry.elements()));
    file.read_f32(entry, 0, values);
    if (entry.name == "model.embed_tokens.weight") {
      for (float& value : values) value *= factor;
    }
    writer.write(std::as_bytes(std::span<const float>(values)));
  }
  writer.finish();
}

// Such a run once went on to its end with the loss of a guess.
TEST(TrainControl, GradientOfZeroIsNamedOnceWithTheTensorThatOverflows) {
  const TempDir dir;
  run_on_threads(request_for({1, 1}, dir / "small", {"train.steps=1", "train.seq=16"}));
  scale_embedding(dir / "small/final", dir / "large", 1e21f);
  TrainRequest request =
      request_for({1, 1}, dir / "run",
                  {"train.steps=4", "train.seq=16", "train.dtype=f32", "checkpoint.every=2"});
  request.init = dir / "large";
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> log(std::tmpfile(), &std::fclose);
  request.log = log.get();
  run_on_threads(request);
  std::string text(size_t(std::ftell(log.get())), '\0');
  std::rewind(log.get());
  text.resize(std::fread(text.data(), 1, text.size(), log.get()));
  const auto count = [&](std::string_view words) {
    int found = 0;
    for (size_t at = text.find(words); at != std::string::npos; at = text.find(words, at + 1)) {
      ++found;
    }
    return found;
  };
  EXPECT_EQ(count("warning: step 1: the gradient norm is 0: nothing is learned from it; tensor "
                  "'model.embed_tokens.weight' has "),
            1)
      << text;
  EXPECT_EQ(count("the gradient norm is 0"), 1) << text;
  EXPECT_EQ(count("warning: step 0: tensor 'model.embed_tokens.weight' has "), 1) << text;
  EXPECT_EQ(count("whose square overflows"), 2) << text;
}

}  // namespace
}  // namespace tandem
