// Training on streams of shards: resumes, layouts, ledgers, shards that vanish.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>
#include <variant>

#include "core/system/files.h"
#include "data_check.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/data/ledger/ledger_check.h"
#include "engine/data/ledger/ledger_rehash.h"
#include "engine/data/stream/shard_stream.h"
#include "engine/train/step_executor.h"
#include "tandem/error.h"
#include "tests/engine/data/open_configured.h"
#include "tests/engine/train/layouts.h"
#include "tests/engine/train/run_results.h"
#include "token_fixtures.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Overrides = std::vector<std::string>;

const Overrides kSmall{"train.seq=16",           "train.batch=12",     "train.microbatch=1",
                       "model.layers=2",         "model.hidden=16",    "model.ffn=32",
                       "model.head_dim=4",       "train.dtype=f32",    "checkpoint.every=3",
                       "train.steps=12",         "optimizer.warmup=2", "data.order=stream",
                       "data.shuffle_windows=20"};

TrainRequest stream_request(const std::string& data, const std::string& out, int dp, int tp = 1) {
  Overrides overrides = kSmall;
  overrides.push_back("data.paths=" + data);
  TrainRequest request = request_for({tp, dp}, out, overrides);
  request.config.parallel.replicas = tp == 1 ? 4 : 0;
  request.resume = true;
  return request;
}

/// Shards of about 60 windows, so that twelve steps of twelve samples reach the third.
void write_lines(const TempDir& dir, const std::string& folder) {
  fs::create_directories(dir / folder);
  for (uint64_t shard = 0; shard < 5; ++shard) {
    std::string lines;
    for (uint64_t i = 0; lines.size() < 1200; ++i) {
      const auto random = philox(3, shard, i);
      lines +=
          nlohmann::json{{"text", std::string(random[0] % 60, char('a' + random[1] % 26))}}.dump() +
          "\n";
    }
    write_bytes(dir / (folder + fmt::format("/{}.jsonl", shard)), lines);
  }
}

struct Killed {};
void train_until_killed(TrainRequest request, int64_t kill) {
  request.before_step = [kill](int64_t step) {
    if (step == kill) throw Killed();
  };
  EXPECT_THROW(run_on_threads(request), Killed);
}

LedgerCheck check_run(const std::string& out, bool all_steps) {
  std::vector<ConsumedSamples> saved;
  for (const std::string& path : list_checkpoints(out)) {
    const TrainState state = read_train_state(path);
    saved.push_back({path, state.step, state.next_sample});
  }
  LedgerCheck check = check_ledger(out + "/ledger.jsonl", saved);
  const TrainConfig config = parse_config(read_file(out + "/config.toml"), "config.toml");
  const auto source = open_configured(config);
  const Sampler sampler(*source, check.start.seq, uint64_t(check.start.seed),
                        make_sampler_options(config.data));
  for (const std::string& problem : rehash_steps(check, sampler, all_steps ? 0 : 3)) {
    check.problems.push_back(problem);
  }
  return check;
}

constexpr int64_t kShardTokens = 100;

void write_token_shards(const std::string& folder, uint64_t seed) {
  fs::create_directories(folder);
  for (uint64_t shard = 0; shard < 100; ++shard) {
    const auto tokens = random_tokens(size_t(kShardTokens), 257, 100 * seed + shard);
    write_bytes(fmt::format("{}/{:02}.bin", folder, shard), tokens_as(tokens, 2));
  }
}

/// Reads batches as two data-parallel ranks do whose requests arrive in reverse order, counts the
/// targets of each batch when the next one has been read, and expects no shard to be opened twice.
void expect_shards_opened_once(const std::string& data, int64_t batch, bool document_mask) {
  Overrides overrides = kSmall;
  overrides.push_back("data.paths=" + data);
  overrides.push_back(fmt::format("train.batch={}", batch));
  overrides.push_back("data.document_separator=\"256\"");
  overrides.push_back(fmt::format("data.document_mask={}", document_mask));
  const TrainConfig config = request_for({1, 2}, "out", overrides).config;
  const auto source = open_configured(config);
  const int64_t seq = config.train.seq, share = batch / 2, end = 480 / batch * batch;
  const Sampler sampler(*source, seq, 5, make_sampler_options(config.data));
  std::vector<int32_t> tokens(static_cast<size_t>(seq)), targets(tokens.size());
  for (int64_t first = 0; first < end; first += batch) {
    for (const int64_t rank : {1, 0}) {
      for (int64_t i = 0; i < share; ++i) sampler.read(first + rank * share + i, tokens, targets);
      while (sampler.read_ahead()) {
      }
    }
    for (int64_t i = 0; first > 0 && i < batch; ++i) sampler.targets(first - batch + i);
  }
  std::vector<int64_t> opened;
  for (const WeightedSource& component : source->components()) {
    opened.push_back(component.source->stream()->opened_shards());
  }
  const std::vector<StreamCursor> cursors = sampler.cursors(end);
  ASSERT_EQ(cursors.size(), opened.size());
  // The block of the last sample and what is read ahead, in shards that all have as many tokens.
  const int64_t ahead = 3 * config.data.shuffle_windows * seq / kShardTokens + 2;
  for (size_t i = 0; i < opened.size(); ++i) {
    EXPECT_EQ(cursors[i].epoch, 0);
    EXPECT_GE(cursors[i].shard, 20);
    EXPECT_GT(opened[i], cursors[i].shard);
    EXPECT_LE(opened[i], cursors[i].shard + 1 + ahead) << "source " << i;
  }
}

TEST(TrainStream, NoShardIsReadAgainForRanksThatAskInReverseOrder) {
  const TempDir dir;
  write_token_shards(dir / "a", 1);
  write_token_shards(dir / "b", 2);
  const std::string blend = fmt::format("[\"0.7 {}\", \"0.3 {}\"]", dir / "a", dir / "b");
  for (const std::string& data : {dir / "a", blend}) {
    for (const int64_t batch : {12, 28}) {  // neither divides the shuffled windows
      for (const bool document_mask : {false, true}) {
        SCOPED_TRACE(fmt::format("{}, batch {}, document mask {}", data, batch, document_mask));
        expect_shards_opened_once(data, batch, document_mask);
      }
    }
  }
}

TEST(TrainStream, KilledRunOfChangingRanksHasTheBitsAndTheSamplesOfAnUndisturbedOne) {
  const TempDir dir;
  write_lines(dir, "data");
  run_on_threads(stream_request(dir / "data", dir / "whole", 4));
  const std::string out = dir / "out";
  train_until_killed(stream_request(dir / "data", out, 4), 5);
  train_until_killed(stream_request(dir / "data", out, 3), 8);
  train_until_killed(stream_request(dir / "data", out, 1), 10);
  run_on_threads(stream_request(dir / "data", out, 4));
  EXPECT_EQ(final_weights(out), final_weights(dir / "whole"));
  for (const bool all_steps : {false, true}) {
    const LedgerCheck check = check_run(out, all_steps);
    EXPECT_THAT(check.problems, ElementsAre());
    EXPECT_EQ(check.starts, 4);
    EXPECT_EQ(check.next_sample, 144);
  }
  const std::vector<LedgerStep> whole = read_steps(dir / "whole");
  for (const LedgerStep& step : read_steps(out)) EXPECT_EQ(step, whole[size_t(step.step) - 1]);
  EXPECT_GE(whole.back().cursors.at(0).shard, 1);
}

TEST(TrainStream, ResumeDoesNotReadShardsBeforeItsCursor) {
  const TempDir dir;
  write_lines(dir, "data");
  const std::string out = dir / "out";
  run_on_threads(stream_request(dir / "data", dir / "whole", 2));
  const std::vector<LedgerStep> whole = read_steps(dir / "whole");
  const auto later = std::ranges::find_if(
      whole, [](const LedgerStep& step) { return step.cursors.at(0).shard > 0; });
  ASSERT_NE(later, whole.end());
  std::atomic<bool> stop = false;
  TrainRequest request = stream_request(dir / "data", out, 2);
  request.stop = &stop;
  request.before_step = [&](int64_t step) { stop = step + 1 == later->step; };
  EXPECT_TRUE(run_on_threads(request).stopped);
  const TrainConfig config = parse_config(read_file(out + "/config.toml"), "config.toml");
  const std::string first =
      dir / fmt::format("data/{}.jsonl", shard_at(uint64_t(config.train.seed), 0, 5, 0));
  write_bytes(first, std::string(fs::file_size(first), 'x'));  // not JSON
  run_on_threads(stream_request(dir / "data", out, 2));
  EXPECT_EQ(final_weights(out), final_weights(dir / "whole"));
}

TEST(TrainStream, ResumeWithoutALedgerReadsTheShardsFromTheirBegin) {
  const TempDir dir;
  write_lines(dir, "data");
  run_on_threads(stream_request(dir / "data", dir / "whole", 2));
  train_until_killed(stream_request(dir / "data", dir / "out", 2), 10);
  fs::remove(dir / "out/ledger.jsonl");
  run_on_threads(stream_request(dir / "data", dir / "out", 2));
  EXPECT_EQ(final_weights(dir / "out"), final_weights(dir / "whole"));
}

TEST(TrainStream, BlendOfStreamsResumesAndIsProven) {
  const TempDir dir;
  write_lines(dir, "a");
  write_lines(dir, "b");
  const std::string blend = fmt::format("[\"0.7 {}\", \"0.3 {}\"]", dir / "a", dir / "b");
  run_on_threads(stream_request(blend, dir / "whole", 2, 2));
  train_until_killed(stream_request(blend, dir / "out", 1, 2), 7);
  run_on_threads(stream_request(blend, dir / "out", 2, 2));
  EXPECT_THAT(check_run(dir / "out", true).problems, ElementsAre());
  EXPECT_THAT(check_run(dir / "out", false).problems, ElementsAre());
  const std::vector<LedgerStep> whole = read_steps(dir / "whole");
  for (const LedgerStep& step : read_steps(dir / "out")) {
    EXPECT_EQ(step, whole[size_t(step.step) - 1]);
  }
  EXPECT_EQ(whole[0].cursors.size(), 2u);
}

TEST(TrainStream, ShardThatVanishesEndsTheRunWithACheckpoint) {
  const TempDir dir;
  write_lines(dir, "data");
  for (const int dp : {1, 3}) {
    const std::string out = dir / fmt::format("out{}", dp);
    TrainRequest request = stream_request(dir / "data", out, dp);
    const std::string next =
        dir / fmt::format("data/{}.jsonl", shard_at(uint64_t(request.config.train.seed), 0, 5, 2));
    const std::string text = read_file(next);
    request.config.train.steps = 40;
    request.before_step = [&](int64_t step) {
      if (step == 1) fs::remove(next);
    };
    try {
      run_on_threads(request);
      ADD_FAILURE() << "accepted";
    } catch (const IoError& error) {
      EXPECT_THAT(error.what(), HasSubstr(next));
      EXPECT_THAT(error.what(), HasSubstr("ended after step"));
      EXPECT_EQ(std::ranges::count(std::string(error.what()), '\n'), 0);
    }
    write_bytes(next, text);
    request.before_step = {};
    EXPECT_EQ(run_on_threads(request).step, 40);
    EXPECT_THAT(check_run(out, true).problems, ElementsAre());
  }
}

TEST(TrainStream, ChangedCursorIsFound) {
  const TempDir dir;
  write_lines(dir, "data");
  const std::string out = dir / "out";
  run_on_threads(stream_request(dir / "data", out, 1));
  std::istringstream lines(read_file(out + "/ledger.jsonl"));
  std::string text;
  int64_t number = 0;
  for (std::string line; std::getline(lines, line);) {
    LedgerLine parsed = parse_ledger_line(line);
    if (auto* step = std::get_if<LedgerStep>(&parsed.record)) {
      if (step->step == 12) step->cursors.at(0).offset += 1;
      text += to_ledger_line(++number, *step);
    } else {
      text += to_ledger_line(++number, std::get<LedgerStart>(parsed.record));
    }
  }
  write_bytes(out + "/ledger.jsonl", text);
  EXPECT_THAT(check_run(out, true).problems,
              ::testing::Contains(HasSubstr("the cursors of step 12 are others in the data")));
}

TEST(TrainStream, KeysThatNeedTheWholeDataAreRefused) {
  for (const auto& [key, message] :
       {std::pair{"data.val_fraction=0.1", "data.val_fraction is 0.1: expected 0 where data.order"},
        {"data.packing=best_fit", "data.packing is best_fit: expected none where data.order"}}) {
    try {
      check_config(request_for({1, 1}, "out", {"data.order=stream", key}).config);
      ADD_FAILURE() << key;
    } catch (const ConfigError& error) {
      EXPECT_THAT(error.what(), HasSubstr(message));
    }
  }
}

}  // namespace
}  // namespace tandem
