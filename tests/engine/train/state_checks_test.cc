// Bits that are flipped in memory during training, and the checks that find them.
#include "engine/train/checks/state_checks.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>

#include "core/system/files.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/data/corpus.h"
#include "engine/parallel/sync/outer_sync.h"
#include "engine/train/checks/fault_injector.h"
#include "engine/train/checks/fault_plan.h"
#include "engine/train/step_exchange.h"
#include "layouts.h"
#include "tandem/error.h"
#include "temp_dir.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

using ::testing::Contains;
using ::testing::HasSubstr;
using Overrides = std::vector<std::string>;
using Json = nlohmann::json;

std::vector<Json> lines_of(const std::string& path) {
  std::vector<Json> lines;
  if (!path_exists(path)) return lines;
  std::istringstream text(read_file(path));
  for (std::string line; std::getline(text, line);) lines.push_back(Json::parse(line));
  return lines;
}

struct Trial {
  int tp, dp;
  Overrides overrides;
  std::string config = "tiny.toml";
  /// Number of copies of a tensor that is sharded over tp and, with experts, of an expert's.
  int copies = 2, expert_copies = 2;
};

TrainConfig config_of(const Trial& trial, const std::string& dtype) {
  Overrides all{"train.dtype=" + dtype, "train.batch=12", "train.seq=16", "check.action=warn"};
  all.insert(all.end(), trial.overrides.begin(), trial.overrides.end());
  TrainConfig config = request_for({trial.tp, trial.dp}, "", all, trial.config).config;
  check_config(config);
  return config;
}

std::vector<Trial> trials() {
  return {{1, 2, {}},
          {2, 2, {}},
          {1, 3, {}, "tiny.toml", 3},
          {2, 2, {"parallel.pp=2", "train.microbatch=2"}},
          {1, 2, {"parallel.zero=0"}},
          {1, 2, {"parallel.zero=2"}},
          {1, 4, {"parallel.dp_shard=2", "train.batch=8"}, "tiny.toml", 4},
          {1, 4, {"parallel.ep=2", "train.batch=8"}, "moe.toml", 4, 2},
          {2, 2, {"parallel.ep=1", "train.batch=8"}, "moe.toml", 2, 2},
          {1, 2, {"parallel.codec=\"weights=int8\""}}};
}

/// Faults that were injected, and findings by step.
struct Outcome {
  std::vector<Json> injected;
  std::vector<std::vector<CheckFinding>> found;
};

/// Objects of a rank that the tests drive.
struct TestRank {
  const ParallelGroups& groups;
  ModelRanks& ranks;
  StepExecutor& executor;
  StateChecks& checks;
  FaultInjector& injector;
  std::optional<OuterSync> learners = {};

  StepSums exchange(const StepSums& local) const { return exchange_sums(groups, local); }
  void initialize() const {
    for (ModelChunk& chunk : ranks.chunks) {
      chunk.stage.initialize(1);
      chunk.optimizer.adopt_weights(chunk.stage.parameter_staging());
      chunk.stage.end_staging();
    }
    executor.weights_changed();
  }
};

/// Runs `step` on every rank for steps [1, steps]; it returns what was found in them.
Outcome run_with_faults(
    const TrainConfig& config, const std::string& plan_text, int64_t steps,
    const std::function<std::vector<CheckFinding>(TestRank&, int64_t step)>& step) {
  const TempDir out;
  const Corpus corpus(config.data.paths, 0);
  Outcome outcome;
  const ParallelDims dims(config.parallel);
  const FaultPlan plan(plan_text, "faults.toml", dims.ranks());
  run_threads({.ranks = dims.ranks()}, [&](Communicator& world) {
    const ParallelGroups groups(world, dims, config.model.experts > 0);
    const Sampler sampler(corpus, config.train.seq, 1);
    ModelRanks ranks(groups, config, {});
    StepExecutor executor(config.train, config.parallel, groups, corpus, sampler, ranks);
    StateChecks checks(groups, config.check, ranks, out.path());
    FaultInjector injector(plan, groups, ranks, config.parallel.sync, out.path());
    TestRank rank{groups, ranks, executor, checks, injector};
    rank.initialize();
    if (groups.sync()) {
      rank.learners.emplace(*groups.sync(), config.parallel.sync,
                            ranks.outer_stages(config.optimizer), 0);
    }
    for (int64_t number = 1; number <= steps; ++number) {
      const auto found = step(rank, number);
      if (world.rank() == 0) outcome.found.push_back(found);
    }
    executor.await_weights();
  });
  outcome.injected = lines_of(out / "injected.jsonl");
  return outcome;
}

/// Weights are flipped in each step, and set again before the next.
Outcome flip_weights(const TrainConfig& config, const std::string& plan_text, int64_t steps) {
  return run_with_faults(config, plan_text, steps, [](TestRank& rank, int64_t step) {
    rank.initialize();
    StepSums local;
    local.checks = rank.checks.sums(step);
    EXPECT_EQ(rank.exchange(local).checks.weights, 0u) << "false alarm";
    rank.injector.before_passes(step, rank.executor);
    local.checks = rank.checks.sums(step);
    return rank.checks.find(rank.exchange(local).checks, step);
  });
}

/// One in each step.
std::string random_flips(uint64_t seed, const std::string& kind, int steps) {
  std::string faults = fmt::format("seed = {}\n", seed);
  for (int step = 1; step <= steps; ++step) {
    faults += fmt::format("[[fault]]\nstep = {}\nkind = \"{}\"\n", step, kind);
  }
  return faults;
}

void expect_all_found(const std::vector<Trial>& all, uint64_t seed, int flips) {
  int trials_run = 0;
  for (const Trial& trial : all) {
    for (const std::string dtype : {"f32", "bf16"}) {
      const TrainConfig config = config_of(trial, dtype);
      const Outcome outcome =
          flip_weights(config, random_flips(seed, "flip_weights", flips), flips);
      ASSERT_EQ(int(outcome.injected.size()), flips);
      for (size_t i = 0; i < outcome.injected.size(); ++i, ++trials_run) {
        const Json& fault = outcome.injected[i];
        SCOPED_TRACE(fmt::format("{} {} {} {}: {}", ParallelDims(config.parallel).describe(), dtype,
                                 trial.config, config.parallel.codec, fault.dump()));
        ASSERT_EQ(outcome.found[i].size(), 1u);
        const CheckFinding& finding = outcome.found[i][0];
        EXPECT_EQ(finding.tensor, fault["tensor"].get<std::string>());
        EXPECT_THAT(finding.ranks, Contains(fault["rank"].get<int>()));
        const bool is_expert = finding.tensor.find("experts.") != std::string::npos;
        const bool is_replicated = finding.tensor.find("norm") != std::string::npos ||
                                   finding.tensor.find(".gate.weight") != std::string::npos;
        const int copies =
            (is_expert ? trial.expert_copies : trial.copies) * (is_replicated ? trial.tp : 1);
        const bool has_owner = dtype == "bf16" && !is_replicated && config.parallel.codec == "none";
        if (copies > 2 || has_owner) {
          EXPECT_EQ(finding.ranks, std::vector<int>{fault["rank"].get<int>()}) << finding.reason;
        }
        EXPECT_GE(finding.compared.size(), 2u);
      }
    }
  }
  EXPECT_EQ(trials_run, int(all.size()) * 2 * flips);
}

TEST(ReplicaCheck, FindsEveryFlipOfAWeightThatRanksHoldCopiesOf) {
  const std::vector<Trial> all = trials();
  expect_all_found({all[1], all[2], all[7]}, 1, 10);
}

TEST(ReplicaCheck, FindsFlipsOfNormsThatTensorParallelRanksHold) {
  for (const auto& [tp, dp] : {std::pair(2, 1), {2, 2}, {4, 1}}) {
    std::string plan;
    for (int step = 1; step <= 8; ++step) {
      plan +=
          fmt::format("[[fault]]\nstep = {}\nkind = \"flip_weights\"\ntensor = \"*norm*\"\n", step);
    }
    const Outcome outcome = flip_weights(config_of({tp, dp, {}}, "f32"), plan, 8);
    ASSERT_EQ(outcome.injected.size(), 8u);
    for (size_t i = 0; i < 8; ++i) {
      ASSERT_EQ(outcome.found[i].size(), 1u);
      const CheckFinding& finding = outcome.found[i][0];
      const int rank = outcome.injected[i]["rank"];
      EXPECT_EQ(finding.tensor, outcome.injected[i]["tensor"].get<std::string>());
      EXPECT_THAT(finding.ranks, Contains(rank));
      EXPECT_EQ(int(finding.ranks.size()), tp * dp > 2 ? 1 : 2);
    }
  }
}

TEST(ReplicaCheckLong, FindsEveryFlipInAllLayouts) {
  for (uint64_t seed = 2; seed < 5; ++seed) expect_all_found(trials(), seed, 24);
}

/// Training with faults in its steps.
Outcome train_with_flips(TrainConfig config, const std::string& plan_text, int64_t steps) {
  config.optimizer.lr = 1e-4;
  return run_with_faults(config, plan_text, steps, [&](TestRank& rank, int64_t step) {
    const auto compute = [&] {
      return rank.executor.compute((step - 1) * config.train.batch,
                                   config.train.batch * config.train.seq);
    };
    rank.injector.before_passes(step, rank.executor);
    StepExecutor::Result result = compute();
    rank.injector.after_passes(step);
    rank.checks.compute_again(step, compute, result);
    StepSums local;
    local.squares = result.squares;
    local.checks = rank.checks.sums(step);
    const StepSums sums = rank.exchange(local);
    const auto found = rank.checks.find(sums.checks, step);
    rank.executor.update(AdamStep::make(config.optimizer, step - 1, 1e-4, std::sqrt(sums.squares)));
    if (rank.learners && rank.learners->sends(step)) {
      rank.executor.await_weights();
      if (rank.learners->after_update(step, 1e-4)) rank.executor.gather_weights();
    }
    return found;
  });
}

/// A flip of a low bit in each step from the second, so that training continues.
std::string low_flips(uint64_t seed, const std::vector<std::string>& kinds, int steps) {
  std::string faults = fmt::format("seed = {}\n", seed);
  for (int step = 2; step <= steps; ++step) {
    faults += fmt::format("[[fault]]\nstep = {}\nkind = \"{}\"\nbit = {}\n", step,
                          kinds[size_t(step) % kinds.size()], step % 20);
  }
  return faults;
}

/// Replicas that train apart, two of two ranks each.
std::vector<Trial> learner_trials() {
  return {{1, 4, {"train.batch=8", "sync.method=local", "sync.learners=2", "sync.every=2"}},
          {1, 4, {"train.batch=8", "sync.method=demo", "sync.learners=2"}}};
}

/// Number of flips of which the check found nothing else than them.
int count_found(const Outcome& outcome, const std::string& check) {
  int number = 0;
  size_t next = 0;
  for (size_t step = 1; step <= outcome.found.size(); ++step) {
    const bool has_fault = next < outcome.injected.size() && outcome.injected[next]["step"] == step;
    const Json fault = has_fault ? outcome.injected[next++] : Json();
    for (const CheckFinding& finding : outcome.found[step - 1]) {
      if (finding.check != check) continue;
      EXPECT_TRUE(has_fault) << describe(finding);
      if (!has_fault) continue;
      EXPECT_EQ(finding.ranks, std::vector<int>{fault["rank"].get<int>()}) << fault.dump();
      ++number;
    }
  }
  return number;
}

std::vector<Trial> state_trials() {
  std::vector<Trial> all = trials();
  all.push_back({1, 2, {"optimizer.name=lamb"}});
  all.push_back({1, 2, {"model.router_bias_update_rate=0.01"}, "moe.toml"});
  all.push_back({1, 2, {"parallel.codec=\"gradients=int4:g32\"", "train.microbatch=2"}});
  all.push_back({1, 1, {"parallel.replicas=3"}});
  for (const Trial& trial : learner_trials()) all.push_back(trial);
  return all;
}

/// Anchors and outer momenta of learners, too.
TEST(StateHashes, FindEveryFlipOfTheOptimizersStateIfAllIsChecked) {
  std::vector<Trial> all = learner_trials();
  all.push_back(trials()[0]);
  all.push_back(trials()[3]);
  for (const Trial& trial : all) {
    SCOPED_TRACE(ParallelDims(config_of(trial, "bf16").parallel).describe());
    TrainConfig config = config_of(trial, "bf16");
    config.check.state = 1;
    const Outcome outcome =
        train_with_flips(config, low_flips(3, {"flip_moments", "flip_masters"}, 16), 17);
    ASSERT_EQ(outcome.injected.size(), 15u);
    EXPECT_EQ(count_found(outcome, "state"), 15);
  }
}

TEST(StateHashesLong, FindTheirShareOfFlipsInAllLayouts) {
  int flips = 0, found = 0;
  for (const Trial& trial : state_trials()) {
    for (const double share : {1.0, 0.25}) {
      TrainConfig config = config_of(trial, "f32");
      config.parallel.dp_bucket_mib = 0.02;
      config.check.state = share;
      config.check.weights = 0;
      const Outcome outcome =
          train_with_flips(config, low_flips(4, {"flip_moments", "flip_masters"}, 40), 40);
      ASSERT_EQ(outcome.injected.size(), 39u);
      const int of_run = count_found(outcome, "state");
      if (share == 1) {
        EXPECT_EQ(of_run, 39) << ParallelDims(config.parallel).describe();
        continue;
      }
      flips += 39;
      found += of_run;
    }
  }
  const double deviation = std::sqrt(0.25 * 0.75 * flips);
  EXPECT_NEAR(found, 0.25 * flips, 3 * deviation) << "of " << flips;
}

TEST(GradientCheck, FindsFlipsInTheShareOfStepsThatAreComputedTwice) {
  for (const double share : {1.0, 0.25}) {
    TrainConfig config = config_of(trials()[1], "f32");
    config.check.recompute = share;
    const int steps = 17;
    const Outcome outcome =
        train_with_flips(config, low_flips(5, {"flip_gradients"}, steps), steps);
    ASSERT_EQ(outcome.injected.size(), 16u);
    const int found = count_found(outcome, "recompute");
    EXPECT_NEAR(found, 16 * share, share == 1 ? 0 : 1);
  }
}

TEST(StateChecksLong, UndisturbedTrainingHasNoFindings) {
  for (const Trial& trial : state_trials()) {
    for (const std::string dtype : {"f32", "bf16"}) {
      TrainConfig config = config_of(trial, dtype);
      config.check.state = config.check.recompute = 1;
      const Outcome outcome = train_with_flips(config, "", 40);
      EXPECT_THAT(outcome.found, testing::Each(testing::IsEmpty()))
          << ParallelDims(config.parallel).describe() << " " << dtype << " "
          << config.parallel.codec;
    }
  }
}

TEST(StateChecks, UndisturbedTrainingHasNoFindings) {
  for (const Trial& trial : {trials()[1], trials()[7]}) {
    TrainConfig config = config_of(trial, "bf16");
    config.check.state = config.check.recompute = 1;
    EXPECT_THAT(train_with_flips(config, "", 5).found, testing::Each(testing::IsEmpty()));
  }
}

/// Run of six steps with faults, checkpoints after steps 2 and 3, and its last error.
std::string run_with_faults(const std::string& out, const std::string& plan,
                            const Overrides& overrides, bool resume = false) {
  Overrides all{"train.steps=6", "train.seq=16", "train.dtype=f32"};
  all.insert(all.end(), overrides.begin(), overrides.end());
  TrainRequest request = request_for({1, 3}, out, all);
  request.config.train.batch = 6;
  request.faults = FaultPlan(plan, "faults.toml", 3);
  request.resume = resume;
  std::atomic<int> saves = 0;
  request.saves = &saves;
  std::atomic<int64_t> requested = 0;
  request.before_step = [&](int64_t step) {
    if (step > 0 && step <= 2 && requested.exchange(step) < step) saves = 1;
  };
  try {
    run_on_threads(request);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

const std::string kFlip =
    "[[fault]]\nstep = 4\nrank = 2\nkind = \"flip_weights\"\nbit = 20\n"
    "tensor = \"*.0.*.down_proj.weight\"\n";

TEST(StateChecks, RunEndsWithTheRankAndTheCheckpointBefore) {
  const TempDir dir;
  const std::string out = dir / "out";
  const std::string error = run_with_faults(out, kFlip, {"check.action=stop"});
  EXPECT_EQ(error,
            fmt::format("step 4: model.layers.0.mlp.down_proj.weight of rank 2 is corrupt: it "
                        "differs from that of ranks 0, 1; ended after step 3, whose weights "
                        "are not saved; resume from {}",
                        checkpoint_path(out, 2)));
  EXPECT_TRUE(path_exists(checkpoint_path(out, 3) + ".corrupt"));
  EXPECT_FALSE(path_exists(out + "/final"));
  // A second one at that step.
  fs::copy(checkpoint_path(out, 3) + ".corrupt", checkpoint_path(out, 3),
           fs::copy_options::recursive);
  fs::remove(out + "/injected.jsonl");
  fs::remove(out + "/checks.jsonl");
  EXPECT_THAT(run_with_faults(out, kFlip, {"check.action=stop"}, true),
              testing::EndsWith("resume from " + checkpoint_path(out, 2)));
  EXPECT_TRUE(path_exists(checkpoint_path(out, 3) + ".corrupt-2"));
  EXPECT_FALSE(path_exists(checkpoint_path(out, 3)));
  const std::vector<Json> checks = lines_of(out + "/checks.jsonl");
  ASSERT_EQ(checks.size(), 1u);
  EXPECT_EQ(checks[0]["ranks"], std::vector<int>{2});
  TrainRequest resumed =
      request_for({1, 3}, out, {"train.steps=6", "train.seq=16", "train.dtype=f32"});
  resumed.config.train.batch = 6;
  resumed.resume = true;
  EXPECT_EQ(run_on_threads(resumed).step, 6);
  run_with_faults(dir / "undisturbed", "", {});
  EXPECT_EQ(read_file(out + "/final/model.safetensors"),
            read_file(dir / "undisturbed/final/model.safetensors"));
}

TEST(StateChecks, RunContinuesWithAWarningOrUnnoticed) {
  const TempDir dir;
  EXPECT_EQ(run_with_faults(dir / "warn", kFlip, {"check.action=warn"}), "");
  EXPECT_EQ(run_with_faults(dir / "off", kFlip, {}), "");
  EXPECT_EQ(run_with_faults(dir / "undisturbed", "", {"check.action=stop"}), "");
  EXPECT_EQ(lines_of(dir / "warn/checks.jsonl").size(), 1u);
  EXPECT_EQ(lines_of(dir / "off/injected.jsonl").size(), 1u);
  EXPECT_FALSE(path_exists(dir / "off/checks.jsonl"));
  const auto model = [&](const std::string& run) {
    return read_file(dir / (run + "/final/model.safetensors"));
  };
  EXPECT_EQ(model("warn"), model("off"));
  EXPECT_NE(model("off"), model("undisturbed"));
}

TEST(FaultPlan, NamesWhatItCannotRead) {
  const auto error_of = [](const std::string& text) -> std::string {
    try {
      const FaultPlan plan(text, "f.toml", 4);
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "accepted";
  };
  const std::string fault = "[[fault]]\nstep = 1\n";
  const std::string names = "expected one of kill, hang, pause, slow, flip_weights";
  EXPECT_EQ(error_of(fault + "kind = \"kill\"\n"), "accepted");
  EXPECT_THAT(error_of("x ="), HasSubstr("f.toml:1: not valid TOML"));
  EXPECT_THAT(error_of("faults = 1"), HasSubstr("f.toml:1: unknown key 'faults'"));
  EXPECT_THAT(error_of("fault = 1"), HasSubstr("f.toml:1: fault is 1: expected tables [[fault]]"));
  EXPECT_THAT(error_of(fault), HasSubstr("f.toml:1: fault.kind is missing"));
  EXPECT_THAT(error_of(fault + "kind = \"kil\"\n"),
              HasSubstr("f.toml:3: fault.kind is kil: " + names));
  EXPECT_THAT(error_of(fault + "kind = \"kill\"\nrank = 4\n"),
              HasSubstr("f.toml:4: fault.rank is 4: expected an integer from 0 to 3"));
  EXPECT_THAT(error_of("[[fault]]\nstep = 0\nkind = \"kill\"\n"),
              HasSubstr("fault.step is 0: expected an integer from 1"));
  EXPECT_EQ(error_of(fault + "kind = \"slow\"\nphase = \"weight gradients\"\n"), "accepted");
  EXPECT_THAT(error_of(fault + "kind = \"slow\"\nphase = \"TP wait\"\n"),
              HasSubstr("f.toml:4: fault.phase is TP wait: expected one of forward, backward, "
                        "weight gradients, update"));
  EXPECT_EQ(error_of(fault + "kind = \"kill\"\nphase = \"TP wait\"\nspan = \"ag\"\n"), "accepted");
  EXPECT_THAT(error_of(fault + "kind = \"kill\"\nphase = \"TP\"\n"),
              HasSubstr("f.toml:4: fault.phase is TP: expected one of data, forward, backward, "));
  EXPECT_THAT(error_of("[random]\nrate = 2\nkinds = [\"kill\"]\n"),
              HasSubstr("random.rate is 2: expected a number from 0 to 1"));
  EXPECT_THAT(error_of(fault + "kind = \"io_error\"\nfile = 3\n"),
              HasSubstr("f.toml:4: fault.file is 3: expected a pattern of paths"));
  EXPECT_THAT(error_of(fault + "kind = \"pause\"\nseconds = -1\n"),
              HasSubstr("fault.seconds is -1: expected a number from 0"));
  EXPECT_THAT(error_of("[random]\nrate = 0.1\n"), HasSubstr("random.kinds is missing"));
}

TEST(FaultPlan, RandomFaultsHaveTheirRateAndDependOnTheSeed) {
  const auto steps_of = [](int seed) {
    const FaultPlan plan(
        fmt::format("seed = {}\n[random]\nrate = 0.1\nkinds = [\"slow\", \"hang\"]\n", seed), "f",
        4);
    std::vector<int64_t> steps;
    for (int64_t step = 1; step <= 1000; ++step) {
      for (const Fault& fault : plan.at(step)) steps.push_back(4 * step + fault.rank);
    }
    return steps;
  };
  EXPECT_NEAR(double(steps_of(1).size()), 400, 80);  // 4 standard deviations
  EXPECT_EQ(steps_of(1), steps_of(1));
  EXPECT_NE(steps_of(1), steps_of(2));
}

}  // namespace
}  // namespace tandem
