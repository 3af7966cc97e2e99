// Learners whose sums and records travel behind their steps, against learners that sum in each
// step, as they do while data in memory are checked.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <thread>
#include <variant>
#include <vector>

#include "core/system/files.h"
#include "core/system/process/clock.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/data/ledger/ledger_check.h"
#include "engine/data/sampler.h"
#include "engine/train/step_reports.h"
#include "tandem/error.h"
#include "tandem/random.h"
#include "tests/engine/data/open_configured.h"
#include "tests/engine/train/known_peak.h"
#include "tests/engine/train/layouts.h"
#include "tests/engine/train/model_metrics.h"
#include "tests/engine/train/temp_dir.h"

namespace tandem {
namespace {

using ::testing::HasSubstr;
using Keys = std::vector<std::string>;

TrainRequest learners_request(const std::string& out, const Keys& more, int learners = 2,
                              Layout inner = {1, 1}) {
  Keys keys{"train.seq=16",
            "train.batch=12",
            "model.layers=2",
            "model.hidden=16",
            "model.ffn=32",
            "model.head_dim=4",
            "train.dtype=f32",
            "optimizer.lr=2e-3",
            "optimizer.warmup=2",
            "sync.method=local",
            fmt::format("sync.learners={}", learners)};
  keys.insert(keys.end(), more.begin(), more.end());
  return request_for({inner.tp, learners * inner.dp}, out, keys);
}

/// A run with sums in each step: checks are on, and compare nothing.
TrainRequest lockstep(TrainRequest request, const std::string& out) {
  request.out = out;
  request.config.check.action = "warn";
  request.config.check.weights = request.config.check.state = request.config.check.recompute = 0;
  return request;
}

bool applies(const TrainConfig& config) {
  return StepReports::applies(config.parallel.sync, config.train, config.check);
}

std::vector<std::string> ledger_steps(const std::string& out) {
  std::vector<std::string> lines;
  std::istringstream file(read_file(out + "/ledger.jsonl"));
  for (std::string line; std::getline(file, line);) {
    auto json = nlohmann::json::parse(line);
    if (json.at("record") != "start") lines.push_back(json.dump());
  }
  return lines;
}

std::string weights_of(const std::string& folder) {
  return read_file(folder + "/model.safetensors");
}

struct ReportCase {
  Keys keys;
  int learners = 2;
  Layout inner{1, 1};
};
void expect_bits_of_sums(const std::vector<ReportCase>& cases) {
  for (const ReportCase& c : cases) {
    SCOPED_TRACE(fmt::format("{}", fmt::join(c.keys, " ")));
    const TempDir dir;
    const TrainRequest request = learners_request(dir / "late", c.keys, c.learners, c.inner);
    const TrainRequest in_step = lockstep(request, dir / "sums");
    EXPECT_TRUE(applies(request.config));
    EXPECT_FALSE(applies(in_step.config));
    const TrainEnd end = run_on_threads(request), expected = run_on_threads(in_step);
    EXPECT_EQ(end.loss, expected.loss);
    EXPECT_EQ(model_metrics(dir / "late"), model_metrics(dir / "sums"));
    EXPECT_EQ(losses(dir / "late").size(), size_t(request.config.train.steps));
    EXPECT_EQ(ledger_steps(dir / "late"), ledger_steps(dir / "sums"));
    EXPECT_EQ(weights_of(dir / "late/final"), weights_of(dir / "sums/final"));
    EXPECT_EQ(list_checkpoints(dir / "late").size(), list_checkpoints(dir / "sums").size());
  }
}
TEST(StepReports, HaveTheBitsOfSumsInEachStep) {
  expect_bits_of_sums({
      {{"sync.every=3", "train.steps=8", "train.validate_every=4", "data.val_fraction=0.2",
        "checkpoint.every=2"},
       3},
      {{"sync.every=4", "sync.fragments=2", "sync.delay=1", "train.steps=9"}, 2, {2, 2}},
      {{"sync.every=1", "train.steps=4"}},
  });
}
TEST(StepReportsLong, HaveTheBitsOfSumsInEachStep) {
  expect_bits_of_sums({
      {{"sync.every=6", "sync.delay=3", "train.steps=20", "checkpoint.every=7",
        "checkpoint.snapshot_every=4"}},
      {{"sync.every=1000", "train.steps=140"}},
      {{"sync.every=4", "train.steps=5", "parallel.pp=2", "train.microbatch=3"}},
  });
}

/// Trains on threads. `before(rank, step)` is called before each step.
void run_with(const TrainRequest& request, double deadline_s,
              const std::function<void(int rank, int64_t step)>& before,
              std::vector<std::atomic<bool>>* stops = nullptr) {
  const std::unique_ptr<const TokenSource> source = open_configured(request.config);
  WorldOptions options;
  options.ranks = ParallelDims(request.config.parallel).ranks();
  options.deadline_s = deadline_s;
  run_threads(options, [&](Communicator& comm) {
    TrainRequest of_rank = with_known_peak(request);
    of_rank.before_step = [&before, rank = comm.rank()](int64_t step) { before(rank, step); };
    if (stops) of_rank.stop = &(*stops)[size_t(comm.rank())];
    train(comm, of_rank, *source);
  });
}

/// Learner 1 begins its second step once learner 0 begins its last one before the exchange.
bool runs_ahead(const TrainRequest& request, double patience_s) {
  const int64_t last = request.config.parallel.sync.every - 1;
  std::atomic<bool> is_ahead = false;
  std::atomic<int> late = 0;
  run_with(request, patience_s, [&](int rank, int64_t step) {
    if (rank == 0 && step == last) is_ahead = true;
    const auto begin = std::chrono::steady_clock::now();
    while (rank == 1 && step == 1 && !is_ahead) {
      if (seconds_since(begin) > 2 * patience_s) break;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    late += rank == 1 && step == 1 && !is_ahead;
  });
  return late == 0;
}

TEST(StepReports, ALearnerWaitsForNoOtherBeforeAnExchange) {
  const TempDir dir;
  for (const char* delay : {"0", "2"}) {
    const TrainRequest request =
        learners_request(dir / (std::string("late") + delay),
                         {"sync.every=6", "train.steps=12", std::string("sync.delay=") + delay});
    EXPECT_TRUE(runs_ahead(request, 60)) << delay;
  }
  const TrainRequest request = learners_request(dir / "out", {"sync.every=6", "train.steps=12"});
  EXPECT_THROW(runs_ahead(lockstep(request, dir / "sums"), 1), Error)
      << "control: sums of every step";
}

/// Learner 1 begins its second step only when learner 0 begins the last step of the second round.
TEST(StepReports, AQuorumDoesNotWaitForALearnerThatIsOneRoundBehind) {
  const TempDir dir;
  const TrainRequest request =
      learners_request(dir / "out", {"sync.every=3", "sync.quorum=1", "train.steps=12"});
  std::atomic<bool> is_ahead = false, is_further = false, was_further = false;
  run_with(request, 60, [&](int rank, int64_t step) {
    if (rank == 0) {
      is_ahead = step >= 5;
      is_further = step >= 6;
    }
    if (rank == 0 || step != 1) return;
    const auto begin = std::chrono::steady_clock::now();
    while (!is_ahead && seconds_since(begin) < 60) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    EXPECT_TRUE(is_ahead);
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    was_further = bool(is_further);
  });
  EXPECT_FALSE(was_further) << "two rounds behind";
  std::vector<nlohmann::json> of_steps;
  std::istringstream lines(read_file(dir / "out/metrics.jsonl"));
  for (std::string line; std::getline(lines, line);)
    of_steps.push_back(nlohmann::json::parse(line));
  ASSERT_EQ(of_steps.size(), 12u);
  EXPECT_EQ(of_steps[2].at("counted_learners"), (std::vector<int>{0}));
}

TEST(StepReports, AStopEndsAllLearnersAtTheNextExchangeAndTheRunResumes) {
  const TempDir dir;
  for (const auto& [keys, last] :
       {std::pair(Keys{"sync.every=4"}, 4), std::pair(Keys{"sync.every=4", "sync.delay=1"}, 5)}) {
    Keys all = keys;
    all.push_back("train.steps=10");
    const TrainRequest whole = learners_request(dir / fmt::format("whole{}", last), all);
    run_on_threads(whole);
    TrainRequest stopped = whole;
    stopped.out = dir / fmt::format("stopped{}", last);
    std::vector<std::atomic<bool>> stops(2);
    run_with(
        stopped, 60,
        [&](int rank, int64_t step) {
          if (rank == 1 && step == 1) stops[1] = true;
        },
        &stops);
    EXPECT_EQ(list_checkpoints(stopped.out),
              std::vector<std::string>{checkpoint_path(stopped.out, last)});
    EXPECT_EQ(losses(stopped.out).size(), size_t(last));
    stopped.resume = true;
    run_on_threads(stopped);
    EXPECT_EQ(weights_of(stopped.out + "/final"), weights_of(whole.out + "/final"));
    EXPECT_EQ(model_metrics(stopped.out), model_metrics(whole.out));
  }
}

TEST(StepReports, ACheckpointByTimeHasTheStateOfOneBySteps) {
  const TempDir dir;
  const auto saved = [&](const std::string& name, const std::string& key) {
    const TrainRequest request =
        request_for({1, 4}, dir / name,
                    {"sync.method=local", "sync.learners=2", "sync.every=1000", "train.steps=10",
                     "parallel.dp_bucket_mib=0.01", key});
    run_on_threads(request);
    return checkpoint_path(request.out, 10);
  };
  const std::string by_steps = saved("steps", "checkpoint.every=10"),
                    by_time = saved("time", "checkpoint.every_s=0.001");
  for (const char* file : {"/model.safetensors", "/optimizer.safetensors"}) {
    EXPECT_TRUE(read_file(by_steps + file) == read_file(by_time + file)) << file;
  }
}

/// Numbers of lines in metrics.jsonl before the steps after `step` - 1 and after `step`.
std::pair<size_t, size_t> lines_around(const TrainRequest& request, int64_t step) {
  std::pair<size_t, size_t> lines;
  run_with(request, 60, [&](int rank, int64_t made) {
    if (rank > 0 || made < step - 1 || made > step) return;
    (made < step ? lines.first : lines.second) = losses(request.out).size();
  });
  return lines;
}

TEST(StepReports, LearnersAreAtOneStepBeforeAllRanksWaitForOneAnother) {
  const TempDir dir;
  const TrainRequest checked =
      learners_request(dir / "check", {"sync.every=1000", "train.steps=24"});
  EXPECT_EQ(lines_around(checked, 22), std::pair(size_t(0), size_t(22))) << "self-check";
  const TrainRequest traced = learners_request(
      dir / "trace", {"sync.every=1000", "train.steps=12", "trace.enabled=true", "trace.steps=3"});
  EXPECT_EQ(lines_around(traced, 5), std::pair(size_t(0), size_t(5))) << "begin of a trace";
  EXPECT_TRUE(path_exists(dir / "trace/trace.json"));
}

TEST(StepReports, AFailedLearnerEndsTheOthersWithItsError) {
  const TempDir dir;
  const TrainRequest request =
      learners_request(dir / "out", {"sync.every=50", "sync.delay=9", "train.steps=100"});
  const auto fail = [](int rank, int64_t step) {
    if (rank == 1 && step == 3) throw IoError("the disk of learner 1 is gone");
  };
  try {
    run_with(request, 60, fail);
    ADD_FAILURE() << "the run ended";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("the disk of learner 1 is gone"));
  }
}

/// A text of one letter, with random bytes in the windows of learner 1's samples of `steps`, or of
/// both learners'.
void write_spikes(const std::string& path, const TrainRequest& like,
                  const std::vector<int64_t>& steps, bool of_both = false) {
  const int64_t seq = like.config.train.seq, batch = like.config.train.batch;
  std::string text(size_t(400 * seq), 'x');
  write_bytes(path, text);
  const Corpus corpus(Keys{path}, 0);
  const Sampler sampler(corpus, seq, uint64_t(like.config.train.seed));
  for (const int64_t step : steps) {
    const int64_t first = (step - 1) * batch + (of_both ? 0 : batch / 2);
    for (int64_t sample = first; sample < step * batch; ++sample) {
      const int64_t window = sampler.window(sample) * seq;
      for (int64_t i = std::max<int64_t>(1, window); i < window + seq; ++i) {
        // No NUL byte, which is no text; the first token is no byte.
        text[size_t(i) - 1] = char(philox(1, 0, uint64_t(i))[0] | 1);
      }
    }
  }
  write_bytes(path, text);
}

/// Why learners made no update, by step.
std::vector<std::string> reasons_of(const std::string& out) {
  std::istringstream lines(read_file(out + "/ledger.jsonl"));
  std::vector<std::string> reasons;
  for (std::string line; std::getline(lines, line);) {
    const LedgerLine parsed = parse_ledger_line(line);
    if (const auto* step = std::get_if<LedgerStep>(&parsed.record)) {
      reasons.push_back(step->no_update);
    }
  }
  return reasons;
}

TEST(StepReports, ALearnerSkipsItsSpikeAndEndsTheRunBeyondItsBudget) {
  const TempDir dir;
  const Keys keys{"sync.every=4", "train.steps=20", "optimizer.lr=0.02", "train.max_loss_spike=2"};
  TrainRequest request = learners_request(dir / "out", keys);
  request.config.train.skip_loss_spikes = 1;
  request.config.data.paths = {dir / "text.txt"};
  request.config.data.val_fraction = 0;
  write_spikes(dir / "text.txt", request, {15});
  run_on_threads(request);
  const std::vector<double> of_steps = losses(dir / "out");
  ASSERT_EQ(of_steps.size(), 20u) << "a step with a learner that skips it counts";
  EXPECT_LT(of_steps[14], 1.5 * of_steps[13]) << "the mean is over learners that made an update";
  EXPECT_EQ(read_train_state(dir / "out/final").control.spike_skips, 1);

  request.config.train.skip_loss_spikes = 0;
  request.out = dir / "ends";
  try {
    run_on_threads(request);
    ADD_FAILURE() << "the run ended without an error";
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), HasSubstr("learner 1: step 15: loss is "));
    EXPECT_THAT(error.what(), HasSubstr("ended after step 16, saved"));
  }
  const std::vector<std::string> reasons = reasons_of(dir / "ends");
  ASSERT_EQ(reasons.size(), 16u);
  EXPECT_EQ(reasons[13], "");
  EXPECT_THAT(reasons[14], HasSubstr("1 of 2 learners made no update: the loss is a spike: "
                                     "learner 1: step 15: loss is "));
  EXPECT_THAT(reasons[15], HasSubstr("the run ends: learner 1: step 15: loss is "));
  EXPECT_EQ(reasons_of(dir / "out")[14], "1 of 2 learners made no update: the loss is a spike");
  EXPECT_EQ(list_checkpoints(dir / "ends"),
            std::vector<std::string>{checkpoint_path(dir / "ends", 16)});
}

TEST(StepReports, TheLedgerHasTheErrorOfLearnersThatMakeNoUpdate) {
  const TempDir dir;
  TrainRequest request = learners_request(dir / "out", {"sync.every=4", "train.steps=30"});
  const std::string text = dir / "text.txt";
  request.config.data.paths = {text};
  request.config.data.val_fraction = 0;
  write_bytes(text, std::string(400'000, 'x'));  // too large to be kept in memory
  const auto shorten = [&text](int rank, int64_t step) {
    if (rank == 0 && step == 6) std::filesystem::resize_file(text, 40);
  };
  EXPECT_THROW(run_with(request, 60, shorten), IoError);
  const std::vector<std::string> reasons = reasons_of(dir / "out");
  ASSERT_FALSE(reasons.empty());
  EXPECT_EQ(reasons.front(), "");
  EXPECT_THAT(reasons.back(), testing::ContainsRegex("learners made no update: the run ends: "
                                                     "learner [01]: .*text.txt: changed while"));
}

TEST(StepReports, AStepWithoutUpdateHasNoLossAndAReason) {
  const TempDir dir;
  const Keys keys{"sync.every=4", "train.steps=16", "optimizer.lr=0.02", "train.max_loss_spike=2"};
  TrainRequest request = learners_request(dir / "out", keys);
  request.config.data.paths = {dir / "text.txt"};
  request.config.data.val_fraction = 0;
  write_spikes(dir / "text.txt", request, {15, 16}, true);
  for (const int64_t skips : {2, 0}) {
    request.config.train.skip_loss_spikes = skips;
    request.out = dir / fmt::format("skips{}", skips);
    const std::string path = request.out + ".log";
    {
      const std::unique_ptr<std::FILE, int (*)(std::FILE*)> log(std::fopen(path.c_str(), "w"),
                                                                &std::fclose);
      request.log = log.get();
      if (skips > 0) {
        const TrainEnd end = run_on_threads(request);
        EXPECT_GT(end.loss, 0) << "the last one with an update";
      } else {
        EXPECT_THROW(run_on_threads(request), ConfigError);
      }
    }
    EXPECT_THAT(read_file(path),
                HasSubstr("step 15: 2 of 2 learners made no update: the loss is a spike"));
    if (skips == 0) {
      EXPECT_THAT(read_file(path),
                  HasSubstr("step 16: 2 of 2 learners made no update: the run ends"));
    }
    const std::vector<std::string> lines = model_metrics(request.out);
    ASSERT_EQ(lines.size(), 16u);
    EXPECT_FALSE(nlohmann::json::parse(lines[13]).at("loss").is_null());
    for (const char* key : {"loss", "grad_norm"}) {
      EXPECT_TRUE(nlohmann::json::parse(lines[14]).at(key).is_null()) << key;
    }
    EXPECT_TRUE(check_ledger(request.out + "/ledger.jsonl", {}).ok());
  }
}

/// The report of 12 steps is read after step 15: it does not have the skip in step 14.
TEST(StepReports, ALearnerRemembersItsSkipsSinceItSentTheReport) {
  const TempDir dir;
  const Keys keys{"sync.every=4", "sync.delay=3", "train.steps=20", "optimizer.lr=0.02",
                  "train.max_loss_spike=2"};
  TrainRequest request = learners_request(dir / "out", keys);
  request.config.train.skip_loss_spikes = 1;
  request.config.data.paths = {dir / "text.txt"};
  request.config.data.val_fraction = 0;
  write_spikes(dir / "text.txt", request, {14, 16});
  try {
    run_on_threads(request);
    ADD_FAILURE() << "the run ended without an error";
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), HasSubstr("learner 1: step 16: loss is "));
  }
  const std::vector<std::string> saved = list_checkpoints(request.out);
  ASSERT_EQ(saved.size(), 1u);
  EXPECT_EQ(read_train_state(saved[0]).control.spike_skips, 1);
  request.out = dir / "more";
  request.config.train.skip_loss_spikes = 2;
  EXPECT_EQ(run_on_threads(request).step, 20) << "control";
}

}  // namespace
}  // namespace tandem
