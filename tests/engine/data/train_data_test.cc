// Training on token files, JSON Lines and blends, compared with training on the same bytes as text.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>

#include "core/system/files.h"
#include "engine/checkpoint/checkpoint.h"
#include "tandem/error.h"
#include "tests/engine/data/open_configured.h"
#include "tests/engine/train/layouts.h"
#include "tests/engine/train/run_results.h"
#include "tests/engine/train/sample_text.h"
#include "token_fixtures.h"

namespace tandem {
namespace {

using ::testing::HasSubstr;
using Overrides = std::vector<std::string>;

const Overrides kShort{"train.steps=4", "train.microbatch=2"};

TrainRequest request_with(Overrides overrides, const std::string& out, Layout layout = {1, 1}) {
  overrides.insert(overrides.begin(), kShort.begin(), kShort.end());
  return request_for(layout, out, overrides);
}

std::string train_with(const Overrides& overrides, const std::string& out, Layout layout = {1, 1}) {
  run_on_threads(request_with(overrides, out, layout));
  return final_weights(out);
}

/// Writes the documents of the sample folder, as byte tokens, as files of the other formats.
void write_sample_as(const TempDir& dir) {
  const Corpus corpus(std::vector<std::string>{sample_folder()}, 0);
  std::vector<int32_t> tokens(static_cast<size_t>(corpus.tokens()));
  corpus.read(0, tokens);
  std::vector<int64_t> lengths;
  std::string lines;
  for (const std::string& path : corpus.files()) {
    const std::string text = read_file(path);
    lengths.push_back(int64_t(text.size()) + 1);
    lines += nlohmann::json{{"text", text}}.dump() + "\n";
  }
  write_megatron(dir / "megatron", tokens, lengths);
  write_bytes(dir / "nanogpt.bin", tokens_as(tokens, 2));
  write_bytes(dir / "numpy.npy", npy_text("<i4", tokens, 4));
  write_bytes(dir / "lines.jsonl", lines);
}

TEST(TrainData, EqualTokensOfEveryFormatTrainTheSameBits) {
  const TempDir dir;
  write_sample_as(dir);
  const std::string expected = train_with({}, dir / "text");
  for (const char* name : {"megatron", "megatron.bin", "nanogpt.bin", "numpy.npy", "lines.jsonl"}) {
    EXPECT_EQ(train_with({"data.paths=" + dir / name}, dir / (std::string("out-") + name)),
              expected)
        << name;
  }
}

TEST(TrainData, ResumedBlendHasTheBitsOfAnUninterruptedOne) {
  const TempDir dir;
  write_bytes(dir / "a.bin", tokens_as(random_tokens(3000, 257, 1), 2));
  write_bytes(dir / "b.bin", tokens_as(random_tokens(700, 257, 2), 2));  // several epochs
  const std::string paths =
      fmt::format("data.paths=[\"0.6 {}\", \"0.4 {}\"]", dir / "a.bin", dir / "b.bin");
  const std::string expected = train_with({paths, "train.steps=8"}, dir / "whole");
  TrainRequest request = request_with({paths, "train.steps=8"}, dir / "halves");
  std::atomic<bool> stop = false;
  request.stop = &stop;
  request.before_step = [&](int64_t step) { stop = step == 3; };
  EXPECT_EQ(run_on_threads(request).step, 4);
  request.stop = nullptr;
  request.before_step = {};
  request.resume = true;
  run_on_threads(request);
  EXPECT_EQ(final_weights(dir / "halves"), expected);
  request.config.data.paths[0].replace(0, 3, "0.5");
  try {
    run_on_threads(request);
    ADD_FAILURE() << "accepted";
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), HasSubstr("the hash of the training text is"));
  }
}

TEST(TrainData, BlendDoesNotDependOnTheRanks) {
  const TempDir dir;
  write_bytes(dir / "a.bin", tokens_as(random_tokens(3000, 257, 1), 2));
  const Overrides overrides{
      fmt::format("data.paths=[\"3 {}\", \"1 {}\"]", dir / "a.bin", dir / "a.bin")};
  train_with(overrides, dir / "one");
  train_with(overrides, dir / "four", {2, 2});
  expect_close(losses(dir / "four"), losses(dir / "one"));
}

std::vector<double> validation_losses(const std::string& out) {
  std::vector<double> found;
  for (const nlohmann::json& step : steps_of(out)) {
    if (step.contains("validation_loss")) found.push_back(step["validation_loss"].get<double>());
  }
  return found;
}

TEST(TrainData, ValidatesOnTheLastDocumentsOrOnASeparateSet) {
  const TempDir dir;
  write_sample_as(dir);
  const Overrides validated{"train.validate_every=2"};
  const auto run = [&](const std::string& name, Overrides more, Layout layout = {1, 1}) {
    more.insert(more.end(), validated.begin(), validated.end());
    train_with(more, dir / name, layout);
    return validation_losses(dir / name);
  };
  const auto split = run("split", {"data.paths=" + dir / "megatron", "data.val_fraction=0.2"});
  ASSERT_EQ(split.size(), 2u);
  EXPECT_NEAR(split[0], std::log(257), 0.5);
  EXPECT_LT(split[1], split[0]);
  // Equal documents as a set of their own.
  const auto source = open_configured(
      request_with({"data.paths=" + dir / "megatron", "data.val_fraction=0.2"}, dir / "x").config);
  std::vector<int32_t> training(static_cast<size_t>(source->tokens()));
  source->read(0, training);
  std::vector<int32_t> held_out(static_cast<size_t>(source->held_out().stream->tokens()));
  source->held_out().stream->read(0, held_out);
  write_bytes(dir / "training.bin", tokens_as(training, 2));
  write_bytes(dir / "set.bin", tokens_as(held_out, 2));
  const Overrides sets{"data.paths=" + dir / "training.bin", "data.val_paths=" + dir / "set.bin"};
  EXPECT_EQ(run("set", sets), split);
  const auto on_ranks = run("ranks", sets, {2, 2});
  ASSERT_EQ(on_ranks.size(), 2u);
  for (size_t i = 0; i < 2; ++i) EXPECT_NEAR(on_ranks[i], split[i], 1e-4);
  Overrides limited = sets;
  limited.push_back("train.validate_steps=1");
  testing::internal::CaptureStderr();
  EXPECT_NE(run("limited", limited), split);
  EXPECT_THAT(testing::internal::GetCapturedStderr(),
              HasSubstr("validation on 4 of 187 windows of 128 tokens of the held-out tokens "
                        "(train.validate_steps)"));
}

TEST(TrainData, RunEndsWithACheckpointAtAShardThatChanges) {
  const TempDir dir;
  write_bytes(dir / "x.bin", tokens_as(random_tokens(5000, 257), 2));
  TrainRequest request = request_with({"data.paths=" + dir / "x.bin"}, dir / "out", {1, 2});
  request.before_step = [&](int64_t step) {
    if (step == 2) std::filesystem::resize_file(dir / "x.bin", 600);
  };
  try {
    run_on_threads(request);
    ADD_FAILURE() << "accepted";
  } catch (const IoError& error) {
    EXPECT_THAT(error.what(), HasSubstr(dir / "x.bin: changed while it is trained on"));
    EXPECT_THAT(error.what(), HasSubstr("ended after step"));
  }
  // Step 3 may have been read before the file was cut.
  EXPECT_TRUE(path_exists(checkpoint_path(dir / "out", 2)) ||
              path_exists(checkpoint_path(dir / "out", 3)));
}

}  // namespace
}  // namespace tandem
