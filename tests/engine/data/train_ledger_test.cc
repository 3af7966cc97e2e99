// Ledgers that trainings write: every sample once, also across lost steps and changed layouts.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <sstream>
#include <variant>

#include "core/system/files.h"
#include "data_check.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/data/ledger/ledger_check.h"
#include "engine/data/ledger/ledger_lines.h"
#include "tests/engine/train/layouts.h"
#include "tests/engine/train/temp_dir.h"

namespace tandem {
namespace {

using Overrides = std::vector<std::string>;
using ::testing::ElementsAre;

const Overrides kSmall{"train.seq=16",      "train.batch=4",     "train.microbatch=1",
                       "model.layers=2",    "model.hidden=16",   "model.ffn=32",
                       "model.head_dim=4",  "train.dtype=f32",   "checkpoint.every=3",
                       "checkpoint.keep=3", "optimizer.warmup=2"};

/// Ends a run without saving, as a kill does.
struct Killed {};

TrainRequest ledger_request(int tp, int dp, int pp, const std::string& out, int64_t steps) {
  Overrides overrides = kSmall;
  overrides.push_back("train.steps=" + std::to_string(steps));
  TrainRequest request = request_for({tp, dp}, out, overrides);
  request.config.parallel.pp = pp;
  request.resume = true;
  return request;
}

/// Trains until `kill` steps are made, and loses those since the last checkpoint.
void train_until_killed(TrainRequest request, int64_t kill) {
  request.before_step = [kill](int64_t step) {
    if (step == kill) throw Killed();
  };
  EXPECT_THROW(run_on_threads(request), Killed);
}

LedgerCheck check_run(const std::string& out) {
  std::vector<ConsumedSamples> saved;
  for (const std::string& path : list_checkpoints(out)) {
    const TrainState state = read_train_state(path);
    saved.push_back({path, state.step, state.next_sample});
  }
  EXPECT_FALSE(saved.empty());
  return check_ledger(out + "/ledger.jsonl", saved);
}

TEST(TrainLedger, ShowsEverySampleOnceAcrossLostStepsAndLayouts) {
  const TempDir dir;
  const std::string out = dir / "out";
  train_until_killed(ledger_request(1, 4, 1, out, 14), 5);  // loses steps 4 and 5
  train_until_killed(ledger_request(1, 2, 1, out, 14), 7);  // step 7
  train_until_killed(ledger_request(2, 1, 2, out, 14), 8);  // steps 7 and 8
  run_on_threads(ledger_request(1, 4, 1, out, 14));
  const LedgerCheck check = check_run(out);
  EXPECT_THAT(check.problems, ElementsAre());
  EXPECT_EQ(check.starts, 4);
  EXPECT_EQ(check.steps, 14);
  EXPECT_EQ(check.dropped_steps, 5);
  EXPECT_EQ(check.next_sample, 56);

  // The text of a step is that of the undisturbed run, on any layout.
  run_on_threads(ledger_request(2, 2, 1, dir / "whole", 14));
  const std::vector<LedgerStep> whole = read_steps(dir / "whole");
  ASSERT_EQ(whole.size(), 14u);
  const std::vector<LedgerStep> steps = read_steps(out);
  EXPECT_EQ(steps.size(), 19u);
  for (const LedgerStep& step : steps) EXPECT_EQ(step, whole[size_t(step.step) - 1]);
  EXPECT_NE(whole[0].text_hash, whole[1].text_hash);
}

TEST(TrainLedger, HasTheLayoutAndTheEpochs) {
  const TempDir dir;
  write_bytes(dir / "text", "a text of fifteen windows or so, which is read in some epochs");
  TrainRequest request = ledger_request(1, 2, 1, dir / "out", 9);
  request.config.data.paths = {dir / "text"};
  request.config.train.seq = 4;
  run_on_threads(request);
  const std::string text = read_file(dir / "out/ledger.jsonl");
  const auto start =
      std::get<LedgerStart>(parse_ledger_line(text.substr(0, text.find('\n'))).record);
  EXPECT_EQ(start.dp, 2);
  EXPECT_EQ(start.microbatch, 1);
  EXPECT_EQ(start.windows, 16);
  EXPECT_EQ(start.data, read_train_state(dir / "out/final").data);
  std::vector<int64_t> epochs;
  for (const LedgerStep& step : read_steps(dir / "out")) epochs.push_back(step.epoch);
  EXPECT_THAT(epochs, ElementsAre(0, 0, 0, 0, 1, 1, 1, 1, 2));
  EXPECT_TRUE(check_run(dir / "out").ok());
}

TEST(TrainLedger, OfARunFromAnEarlierVersionNamesWhatItCannotShow) {
  const TempDir dir;
  const std::string out = dir / "out";
  train_until_killed(ledger_request(1, 1, 1, out, 8), 4);
  std::filesystem::remove(out + "/ledger.jsonl");
  run_on_threads(ledger_request(1, 1, 1, out, 8));
  EXPECT_THAT(check_run(out).problems,
              ElementsAre("line 1: the run starts after step 3 with sample 12: samples 0 to 11 of "
                          "epoch 0 have no record"));
}

}  // namespace
}  // namespace tandem
