// Learners that exchange their changes, against learners simulated in one process with plain loops
// over whole arrays.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <latch>
#include <nlohmann/json.hpp>
#include <numeric>
#include <sstream>
#include <string>
#include <vector>

#include "core/formats/safetensors.h"
#include "core/system/files.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/parallel/sync/learner_messages.h"
#include "engine/plan/cost/memory.h"
#include "tandem/codec.h"
#include "tandem/error.h"
#include "tests/engine/parallel/simulated_learners.h"
#include "tests/engine/train/layouts.h"
#include "tests/engine/train/model_metrics.h"
#include "tests/engine/train/temp_dir.h"

namespace tandem {
namespace {

/// Tensors of a checkpoint's or a model's file whose names begin with `prefix`.
Tensors read_tensors(const std::string& path, const std::string& prefix, const Tensors& like) {
  const SafetensorsFile file(path);
  Tensors tensors;
  for (const auto& [name, values] : like) {
    const SafetensorsEntry* entry = file.find(prefix + name);
    if (!entry) continue;
    tensors[name].resize(values.size());
    file.read_f32(*entry, 0, tensors[name]);
  }
  return tensors;
}

struct SyncCase {
  int learners = 2;
  std::vector<std::string> keys = {};
  int steps = 6;
  std::string config = "tiny.toml";
  int tp = 1, inner_dp = 1, ep = 1;
  std::vector<std::pair<int64_t, int>> late = {};  ///< step of an exchange, learner
};

TrainRequest make_request(const SyncCase& c, const std::string& out) {
  std::vector<std::string> keys{"train.steps=" + std::to_string(c.steps),
                                "train.seq=16",
                                "train.batch=12",
                                "optimizer.warmup=0",
                                "parallel.dp_bucket_mib=0.03",
                                "checkpoint.every=" + std::to_string(c.steps),
                                "sync.method=local",
                                "sync.learners=" + std::to_string(c.learners),
                                "parallel.ep=" + std::to_string(c.ep)};
  keys.insert(keys.end(), c.keys.begin(), c.keys.end());
  TrainRequest request = request_for({c.tp, c.learners * c.inner_dp}, out, keys, c.config);
  std::string faults;
  for (const auto& [step, learner] : c.late) {
    faults += fmt::format("[[fault]]\nstep = {}\nrank = {}\nkind = \"late_message\"\n", step,
                          learner * c.tp * c.inner_dp);
  }
  request.faults = FaultPlan(faults, "late", c.tp * c.learners * c.inner_dp);
  return request;
}

void expect_same(const Tensors& found, const Tensors& expected, const std::string& what) {
  ASSERT_EQ(found.size(), expected.size()) << what;
  for (const auto& [name, values] : expected) {
    EXPECT_TRUE(found.at(name) == values) << what << ": " << name;
  }
}

/// Mean of the learners' weights, added in their order.
Tensors mean_of(const std::vector<Tensors>& learners) {
  Tensors mean = learners[0];
  for (size_t learner = 1; learner < learners.size(); ++learner) {
    for (auto& [name, values] : mean) {
      const std::vector<float>& other = learners[learner].at(name);
      for (size_t i = 0; i < values.size(); ++i) values[i] += other[i];
    }
  }
  for (auto& [name, values] : mean) {
    for (float& value : values) value /= float(learners.size());
  }
  return mean;
}

void check_case(const SyncCase& c) {
  const TempDir dir;
  const TrainRequest request = make_request(c, dir / "out");
  const Learners expected = Simulation(request).run();
  run_on_threads(request);
  const std::string checkpoint = checkpoint_path(dir / "out", c.steps);
  const auto expect_model = [](const std::string& folder, const Tensors& model) {
    expect_same(read_tensors(folder + "/model.safetensors", "", model), model, folder);
  };
  expect_model(checkpoint, expected.anchor);
  const SyncConfig& sync = request.config.parallel.sync;
  const bool are_equal = sync.is_demo() || (sync.num_fragments() == 1 && sync.delay == 0 &&
                                            c.steps % sync.period() == 0);
  expect_model(std::string(dir / "out") + "/final",
               are_equal ? expected.anchor : mean_of(expected.weights));
  for (int learner = 0; learner < c.learners; ++learner) {
    const std::string prefix = fmt::format("learner.{}.", learner);
    expect_same(read_tensors(checkpoint + "/optimizer.safetensors", prefix, expected.anchor),
                expected.weights[size_t(learner)], prefix);
  }
}

void check_cases(const std::vector<SyncCase>& cases) {
  for (const SyncCase& c : cases) {
    SCOPED_TRACE(fmt::format("{} learners, {}", c.learners, fmt::join(c.keys, " ")));
    check_case(c);
  }
}
TEST(OuterSync, HasTheBitsOfSimulatedLearners) {
  check_cases({
      {.learners = 3, .keys = {"sync.every=3", "sync.outer.nesterov=false"}, .steps = 7},
      {.keys = {"sync.every=4", "sync.fragments=2", "sync.delay=1"}, .steps = 9},
      {.learners = 3, .keys = {"sync.every=1", "sync.topk=0.1", "sync.bits=4", "sync.beta=1"}},
      {.keys = {"sync.method=demo", "optimizer.lr_scale=[\"*embed*=0.5\"]",
                "optimizer.no_decay=[\"*q_proj*\"]"}},
  });
}
TEST(OuterSyncLong, HasTheBitsOfSimulatedLearners) {
  check_cases({
      {.keys = {"sync.every=2"}},
      {.keys = {"sync.every=1", "sync.outer.lr=1", "sync.outer.momentum=0"}, .steps = 3},
      {.keys = {"sync.every=4", "sync.fragments=2"}, .steps = 9},
      {.learners = 3, .keys = {"sync.every=3", "sync.delay=2", "sync.mix=0.25"}, .steps = 8},
      {.keys = {"sync.every=2"}, .steps = 4, .config = "moe.toml"},
      {.keys = {"sync.every=2", "sync.topk=0.02"}},
      {.keys = {"sync.every=4", "sync.fragments=2", "sync.delay=1", "sync.topk=0.05"}, .steps = 9},
      {.keys = {"sync.method=demo"}},
      {.learners = 3,
       .keys = {"sync.method=demo", "sync.every=1", "sync.topk=13", "sync.tile=16", "sync.bits=3",
                "sync.beta=0.9"},
       .steps = 3},
  });
}

TEST(OuterSync, LearnersThatNeverExchangeTrainApart) {
  const TempDir dir;
  const TrainRequest request = make_request({.keys = {"sync.every=100"}, .steps = 4}, dir / "out");
  check_case({.keys = {"sync.every=100"}, .steps = 4});
  const Learners apart = Simulation(request).run();
  EXPECT_EQ(apart.anchor, apart.initial);
  EXPECT_NE(apart.weights[0], apart.weights[1]);
}

std::string final_weights(const std::string& out) {
  return read_file(out + "/final/model.safetensors");
}

TEST(OuterSync, OneLearnerHasTheBitsOfNoExchange) {
  const TempDir dir;
  const SyncCase one{.learners = 1, .keys = {"sync.every=2"}, .steps = 5, .inner_dp = 2};
  run_on_threads(make_request(one, dir / "one"));
  TrainRequest without = make_request(one, dir / "none");
  without.config.parallel.sync = {};
  run_on_threads(without);
  EXPECT_EQ(final_weights(dir / "one"), final_weights(dir / "none"));
  EXPECT_EQ(model_metrics(dir / "one"), model_metrics(dir / "none"));
  // A second learner changes them.
  run_on_threads(make_request({.keys = {"sync.every=2"}, .steps = 5}, dir / "two"));
  EXPECT_NE(final_weights(dir / "two"), final_weights(dir / "none"));
}

/// Bytes that a rank sends in each step, the ranks' mean.
std::vector<double> sync_bytes(const std::string& out) {
  std::istringstream lines(read_file(out + "/metrics.jsonl"));
  std::vector<double> bytes;
  for (std::string line; std::getline(lines, line);) {
    bytes.push_back(nlohmann::json::parse(line).at("sent_bytes").at("sync").get<double>());
  }
  return bytes;
}

TEST(OuterSync, SendsTheBytesOfItsFormula) {
  const TempDir dir;
  const SyncCase dense{.learners = 3, .keys = {"sync.every=2"}, .steps = 5, .inner_dp = 2};
  const TrainRequest request = make_request(dense, dir / "f32");
  run_on_threads(request);
  // A learner's ranks together send each weight to the ranks of the two others.
  const double whole = 2 * 4.0 * double(request.config.model.parameters()) / 2;
  EXPECT_THAT(sync_bytes(dir / "f32"), testing::ElementsAre(0, whole, 0, whole, 0));

  const SyncCase encoded{.keys = {"sync.every=2", "sync.codec=int4:g32"}, .steps = 2};
  run_on_threads(make_request(encoded, dir / "int4"));
  const auto bytes = sync_bytes(dir / "int4");
  const double bits = 8 * bytes.back() / double(request.config.model.parameters());
  EXPECT_GT(bits, 4.5);  // a scale in bf16 for each 32
  EXPECT_LT(bits, 4.7);  // and norms in f32
}

TEST(OuterSync, TakesTheMemoryThatIsExpected) {
  struct Case {
    std::vector<std::string> keys;
    double outer;  ///< bytes a parameter of a rank, of two that divide them
  };
  for (const Case& c :
       {Case{{"sync.every=2"}, 4}, Case{{"sync.every=2", "sync.outer.momentum=0"}, 2},
        Case{{"sync.every=2", "sync.topk=0.1"}, 4},
        Case{{"sync.every=4", "sync.fragments=2", "sync.delay=1"}, 6}}) {
    const TempDir dir;
    const TrainRequest request =
        make_request({.keys = c.keys, .steps = 1, .inner_dp = 2}, dir / "out");
    run_on_threads(request);
    const auto step = nlohmann::json::parse(read_file(dir / "out/metrics.jsonl"));
    const double measured = step.at("state_bytes_per_parameter").get<double>();
    const StateBytes expected = MemoryEstimate(request.config).state(2);
    EXPECT_EQ(expected.outer, c.outer);
    EXPECT_NEAR(measured, expected.total(), 0.1 * measured);
    EXPECT_GT(measured, 1.1 * (expected.total() - c.outer));
  }
}

TEST(OuterSync, SparseMessagesHaveTheBytesOfTheirFormula) {
  const TempDir dir;
  const SyncCase local{.keys = {"sync.every=2", "sync.topk=0.015625"}, .steps = 2};
  const SyncCase demo{.keys = {"sync.method=demo", "sync.every=1"}, .steps = 2};
  for (const SyncCase& c : {local, demo}) {
    const std::string out = dir / c.keys.front();
    const TrainRequest request = make_request(c, out);
    run_on_threads(request);
    Simulation simulation(request);
    simulation.run();
    EXPECT_EQ(sync_bytes(out).back(), simulation.message_bytes()) << c.keys.front();
  }
}

std::vector<SyncCase> late_cases() {
  return {
      {.learners = 3,
       .keys = {"sync.every=2", "sync.quorum=2"},
       .steps = 8,
       .late = {{2, 1}, {4, 2}}},
      {.keys = {"sync.every=2", "sync.quorum=1"}, .steps = 7, .late = {{2, 1}, {4, 1}}},
      {.keys = {"sync.every=2", "sync.quorum=1", "sync.topk=0.1"}, .late = {{2, 1}}},
      {.learners = 3,
       .keys = {"sync.every=4", "sync.fragments=2", "sync.delay=1", "sync.quorum=2"},
       .steps = 9,
       .late = {{4, 1}, {6, 2}}},
  };
}

/// Every second case, from `first` on.
void expect_changes_of_late_learners(size_t first) {
  const std::vector<SyncCase> cases = late_cases();
  for (size_t i = first; i < cases.size(); i += 2) {
    const SyncCase& c = cases[i];
    SCOPED_TRACE(fmt::format("{} learners, {}", c.learners, fmt::join(c.keys, " ")));
    check_case(c);
    const TempDir dir;
    const TrainRequest request = make_request(c, dir / "out");
    EXPECT_NE(Simulation(request).run().anchor, Simulation(request, false, true).run().anchor)
        << "control: a late learner's changes are lost";
    EXPECT_NE(Simulation(request).run().anchor,
              Simulation(make_request({c.learners, c.keys, c.steps}, dir / "out")).run().anchor)
        << "control: none is late";
  }
}
TEST(OuterSync, ALateLearnerAddsItsChangesToItsNextMessage) {
  expect_changes_of_late_learners(1);
}
TEST(OuterSyncLong, ALateLearnerAddsItsChangesToItsNextMessage) {
  expect_changes_of_late_learners(0);
}

TEST(OuterSync, AQuorumOfAllHasTheBitsOfNone) {
  const TempDir dir;
  run_on_threads(make_request({.keys = {"sync.every=2"}, .steps = 5}, dir / "none"));
  run_on_threads(
      make_request({.keys = {"sync.every=2", "sync.quorum=2"}, .steps = 5}, dir / "all"));
  EXPECT_EQ(final_weights(dir / "all"), final_weights(dir / "none"));
  EXPECT_EQ(model_metrics(dir / "all"), model_metrics(dir / "none"));
}

TEST(OuterSync, AMissedQuorumNamesAllMissingLearners) {
  std::latch is_over(3);
  WorldOptions options;
  options.ranks = 3;
  run_threads(options, [&is_over](Communicator& world) {
    LearnerMessages messages(world, "messages", 16, 2);
    messages.begin_round();
    if (world.rank() == 0) {
      messages.send(16);
      world.set_deadline(0.2);
      try {
        messages.receive(0);
        ADD_FAILURE() << "expected Timeout";
      } catch (const Timeout& error) {
        EXPECT_THAT(error.what(), testing::HasSubstr("for rank 1"));
        EXPECT_THAT(error.what(), testing::HasSubstr("missing learners: 1, 2"));
      }
    }
    is_over.arrive_and_wait();
  });
}

/// Learners whose messages counted, by step; empty for a step without an exchange.
std::vector<std::vector<int>> counted(const std::string& out) {
  std::istringstream lines(read_file(out + "/metrics.jsonl"));
  std::vector<std::vector<int>> all;
  for (std::string line; std::getline(lines, line);) {
    all.push_back(nlohmann::json::parse(line).value("counted_learners", std::vector<int>()));
  }
  return all;
}

TEST(OuterSync, MetricsNameTheLearnersThatCounted) {
  const TempDir dir;
  SyncCase late = late_cases()[0];
  late.late.emplace_back(3, 1);  // sends nothing
  run_on_threads(make_request(late, dir / "out"));
  using Counted = std::vector<int>;
  EXPECT_THAT(counted(dir / "out"),
              testing::ElementsAre(Counted(), Counted{0, 2}, Counted(), Counted{0, 1}, Counted(),
                                   Counted{0, 1, 2}, Counted(), Counted{0, 1, 2}));
  EXPECT_EQ(std::ranges::count(read_file(dir / "out/injected.jsonl"), '\n'), 2);
  run_on_threads(make_request({.keys = {"sync.every=2"}, .steps = 2}, dir / "all"));
  EXPECT_THAT(counted(dir / "all"), testing::ElementsAre(Counted(), Counted()));
}

/// With few buckets an owner has nothing of some fragments.
TEST(OuterSync, MetricsNameNoLearnersWhereRank0HasNothing) {
  const TempDir dir;
  run_on_threads(make_request(
      {.keys = {"sync.every=4", "sync.fragments=4", "sync.quorum=1", "parallel.dp_bucket_mib=100"},
       .steps = 8,
       .inner_dp = 2,
       .late = {{100, 1}}},
      dir / "out"));
  using Counted = std::vector<int>;
  EXPECT_THAT(counted(dir / "out"),
              testing::ElementsAre(Counted{0, 1}, Counted{0, 1}, Counted(), Counted{0, 1},
                                   Counted{0, 1}, Counted{0, 1}, Counted(), Counted{0, 1}));
}

/// Mean of the last quarter.
double last_loss(const std::vector<double>& losses) {
  const size_t count = losses.size() / 4;
  return std::accumulate(losses.end() - std::ptrdiff_t(count), losses.end(), 0.0) / double(count);
}

/// Each at its best of the learning rates 1e-3, 1.5e-3, 2e-3, 4e-3 and 8e-3.
TEST(OuterSyncLong, MomentumThatKeepsWhatItHasSentLearnsLess) {
  const TempDir dir;
  const auto run = [&](const char* lr, bool forgets) {
    const TrainRequest request =
        make_request({.keys = {"sync.method=demo", "sync.every=1", "optimizer.min_lr=0",
                               std::string("optimizer.lr=") + lr},
                      .steps = 160},
                     dir / "out");
    return last_loss(Simulation(request, forgets).run().losses);
  };
  const double with = run("4e-3", false);
  EXPECT_LT(with, 3.2) << "begins at 5.5";
  EXPECT_GT(run("2e-3", true), 1.03 * with) << "control: what was sent is not subtracted";
}

/// At the best of the learning rates 1e-3, 2e-3 and 4e-3.
TEST(OuterSyncLong, ALearnerThatIsLateInEverySecondRoundLearnsAsMuch) {
  const TempDir dir;
  SyncCase c{.learners = 3, .keys = {"sync.every=4", "optimizer.lr=1e-3"}, .steps = 120};
  run_on_threads(make_request(c, dir / "all"));
  c.keys.push_back("sync.quorum=2");  // on a busy machine more messages may be late
  for (int64_t step = 4; step <= c.steps; step += 8) c.late.emplace_back(step, 1);
  run_on_threads(make_request(c, dir / "late"));
  const double all = last_loss(losses(dir / "all")), late = last_loss(losses(dir / "late"));
  EXPECT_LT(all, 3.4) << "begins at 5.5";
  EXPECT_LT(late, 1.005 * all);
  EXPECT_NE(late, all);
}

TEST(OuterSync, LearnersOfSeveralRanksTrainAsOfOne) {
  const TempDir dir;
  const std::vector<std::string> keys{"sync.every=3", "sync.fragments=2"};
  const SyncCase single{.keys = keys, .steps = 7};
  const TrainRequest request = make_request(single, dir / "single");
  run_on_threads(request);
  struct Inner {
    int tp, dp;
    std::vector<std::string> keys;
  };
  for (const Inner& inner : {Inner{2, 1, {}}, Inner{1, 2, {}}, Inner{1, 3, {"parallel.zero=2"}},
                             Inner{1, 1, {"parallel.pp=2", "train.microbatch=3"}}}) {
    SyncCase c = single;
    c.tp = inner.tp;
    c.inner_dp = inner.dp;
    c.keys.insert(c.keys.end(), inner.keys.begin(), inner.keys.end());
    const std::string out = dir / fmt::format("tp{}dp{}{}", c.tp, c.inner_dp, inner.keys.size());
    SCOPED_TRACE(out);
    run_on_threads(make_request(c, out));
    expect_close(losses(out), losses(dir / "single"));
  }
}

/// Share of a model's values that differ by more than half a step of DeMo, whose steps are as large
/// as the rate in every weight.
double changed_share(const std::string& found, const std::string& expected, double lr) {
  const SafetensorsFile a(found + "/final/model.safetensors"),
      b(expected + "/final/model.safetensors");
  int64_t changed = 0, all = 0;
  for (const SafetensorsEntry& entry : b.entries()) {
    std::vector<float> x(size_t(entry.elements())), y(x.size());
    a.read_f32(a.require(entry.name, entry.shape), 0, x);
    b.read_f32(entry, 0, y);
    for (size_t i = 0; i < x.size(); ++i) changed += std::abs(double(x[i]) - double(y[i])) > lr / 2;
    all += entry.elements();
  }
  return double(changed) / double(all);
}

/// Other layouts round gradients otherwise, which may change the sign of a mean that is 0 but for
/// rounding, and which of two nearly equal cosines is sent: few weights differ, by whole steps.
void expect_tiles_of_whole_tensors(const std::vector<SyncCase>& layouts) {
  const TempDir dir;
  constexpr double kLr = 2e-3;
  const std::vector<std::string> keys{"sync.method=demo",   "sync.tile=16",
                                      "sync.topk=8",        "model.ffn=96",
                                      "train.microbatch=1", "optimizer.min_lr=2e-3"};
  const auto request = [&](SyncCase c, const std::string& out) {
    c.steps = 4;
    c.keys.insert(c.keys.end(), keys.begin(), keys.end());
    // The auxiliary loss is of the samples that replicas have at once.
    if (c.config == "moe.toml") {
      c.keys.insert(c.keys.end(), {"model.aux_loss_coeff=0", "train.batch=24"});
    }
    return make_request(c, out);
  };
  for (const std::string config : {"tiny.toml", "moe.toml"}) {
    run_on_threads(request({.config = config}, dir / config));
  }
  for (const SyncCase& c : layouts) {
    const std::string out =
        dir / fmt::format("{}tp{}dp{}ep{}{}", c.config, c.tp, c.inner_dp, c.ep, c.keys.size());
    SCOPED_TRACE(out);
    run_on_threads(request(c, out));
    expect_close(losses(out), losses(dir / c.config));
    EXPECT_LE(changed_share(out, dir / c.config, kLr), 1e-3);
  }
  // Control: other tiles.
  SyncCase other{.keys = keys, .steps = 4};
  other.keys.push_back("sync.tile=8");
  other.keys.push_back("sync.topk=2");
  run_on_threads(make_request(other, dir / "other"));
  EXPECT_GT(changed_share(dir / "other", dir / "tiny.toml", kLr), 0.1);
}
TEST(OuterSync, TilesOfSeveralRanksAreThoseOfWholeTensors) {
  expect_tiles_of_whole_tensors({
      {.tp = 2, .inner_dp = 3},
      // Owners that begin within the experts of a layer.
      {.keys = {"parallel.dp_bucket_mib=0.01"}, .config = "moe.toml", .inner_dp = 4, .ep = 2},
  });
}
TEST(OuterSyncLong, TilesOfSeveralRanksAreThoseOfWholeTensors) {
  expect_tiles_of_whole_tensors({
      {.tp = 2},
      {.inner_dp = 2},
      {.keys = {"parallel.pp=2"}, .inner_dp = 2},
      {.config = "moe.toml", .inner_dp = 2, .ep = 2},
      {.config = "moe.toml", .tp = 2, .inner_dp = 3},
  });
}

}  // namespace
}  // namespace tandem
