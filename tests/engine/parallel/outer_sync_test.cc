// Learners that exchange their changes, against learners simulated in one process with plain loops
// over whole arrays.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "core/formats/safetensors.h"
#include "core/system/files.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/optim/learning_rate.h"
#include "engine/parallel/sharded/parameter_slices.h"
#include "engine/plan/cost/memory.h"
#include "engine/train/model_ranks.h"
#include "engine/train/step_executor.h"
#include "tandem/codec.h"
#include "tests/engine/data/open_configured.h"
#include "tests/engine/train/layouts.h"
#include "tests/engine/train/model_metrics.h"
#include "tests/engine/train/temp_dir.h"

namespace tandem {
namespace {

using Tensors = std::map<std::string, std::vector<float>>;

Tensors make_tensors(std::span<const Parameter> list, std::span<const float> flat) {
  Tensors tensors;
  ParameterSlices(list).for_each({0, int64_t(flat.size())}, [&](const ParameterSlice& slice) {
    const Parameter& p = list[slice.parameter];
    std::vector<float>& values = tensors[p.name];
    values.resize(size_t(p.shape[0] * (p.shape.size() > 1 ? p.shape[1] : 1)));
    std::copy_n(flat.begin() + slice.flat, slice.count, values.begin() + slice.whole);
  });
  return tensors;
}

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

struct Learners {
  Tensors initial, anchor;
  std::vector<Tensors> weights;  ///< by learner
};

/// A learner's arrays; all have the same flat layout, of one rank.
struct Simulated {
  std::vector<float> initial, weights, anchor, momentum, sent;
};

class Simulation {
 public:
  Simulation(const TrainRequest& request)
      : config_(request.config),
        sync_(config_.parallel.sync),
        learners_(int(sync_.learners)),
        source_(open_configured(config_)),
        all_(size_t(learners_)) {
    config_.parallel.sync = {};
    config_.parallel.dp = 1;
    config_.train.batch /= learners_;
  }

  Learners run() {
    WorldOptions options;
    options.ranks = learners_;
    run_threads(options, [this](Communicator& world) { train_learner(world); });
    Learners result{make_tensors(list_, all_[0].initial), make_tensors(list_, all_[0].anchor), {}};
    for (const Simulated& s : all_) {
      EXPECT_EQ(s.anchor, all_[0].anchor);
      result.weights.push_back(make_tensors(list_, s.weights));
    }
    return result;
  }

 private:
  void train_learner(Communicator& world) {
    const int learner = world.rank();
    const auto alone = world.split(learner, 0);
    const ParallelGroups groups(*alone, ParallelDims(1, 1), config_.model.experts > 0);
    const int64_t share = config_.train.batch;
    const Sampler sampler(
        *source_, config_.train.seq, uint64_t(config_.train.seed),
        make_sampler_options(config_.data, [this, share, learner](int64_t sample) {
          return sample / share * share * learners_ + learner * share + sample % share;
        }));
    ModelRanks ranks(groups, config_, {});
    StepExecutor executor(config_.train, config_.parallel, groups, *source_, sampler, ranks);
    Stage& stage = ranks.chunks.front().stage;
    ShardedOptimizer& optimizer = ranks.chunks.front().optimizer;
    stage.initialize(uint64_t(config_.train.seed));
    optimizer.adopt_weights(stage.parameter_staging());
    stage.end_staging();
    executor.weights_changed();
    Simulated& local = all_[size_t(learner)];
    local.weights.resize(size_t(stage.weights().elements()));
    for (auto* zeros : {&local.momentum, &local.sent}) zeros->resize(local.weights.size());
    copy_weights(optimizer, local.weights, true);
    local.initial = local.anchor = local.weights;
    if (learner == 0) list_ = stage.parameter_list();
    for (int64_t step = 0; step < config_.train.steps; ++step) {
      const int64_t first = step * share;
      const StepExecutor::Result result = executor.compute(first, executor.targets(first));
      const double lr = learning_rate(config_.optimizer, config_.train, step, 0, 0);
      executor.update(AdamStep::make(config_.optimizer, step, lr, std::sqrt(result.squares)));
      executor.await_weights();
      copy_weights(optimizer, local.weights, true);
      world.barrier();
      exchange(world, local, step + 1);
      world.barrier();
      copy_weights(optimizer, local.weights, false);
      executor.gather_weights();
    }
    executor.await_weights();
  }

  static void copy_weights(const ShardedOptimizer& optimizer, std::vector<float>& flat, bool out) {
    for (const StateSlice& slice : optimizer.slices(Moment::weights)) {
      float* const values = slice.values.as<float>();
      for (int64_t i = 0; i < slice.values.elements(); ++i) {
        float& to = flat[size_t(slice.begin + i)];
        out ? to = values[i] : values[i] = to;
      }
    }
  }

  /// Steps after which the fragment is sent.
  bool sends(int fragment, int64_t step) const {
    const int64_t offset = fragment * sync_.every / sync_.num_fragments();
    return step > 0 && (step - offset) % sync_.every == 0;
  }

  void exchange(Communicator& world, Simulated& local, int64_t step) {
    const std::vector<int> fragment_of = assign_fragments(list_, sync_.num_fragments());
    for (int fragment = 0; fragment < sync_.num_fragments(); ++fragment) {
      std::vector<size_t> elements;
      ParameterSlices(list_).for_each({0, int64_t(local.weights.size())},
                                      [&](const ParameterSlice& slice) {
                                        if (fragment_of[slice.parameter] != fragment) return;
                                        for (int64_t i = 0; i < slice.count; ++i)
                                          elements.push_back(size_t(slice.flat + i));
                                      });
      if (sync_.delay > 0 && sends(fragment, step - sync_.delay)) outer_step(local, elements);
      if (sends(fragment, step)) {
        for (const size_t i : elements) local.sent[i] = local.anchor[i] - local.weights[i];
      }
      world.barrier();
      if (sync_.delay == 0 && sends(fragment, step)) outer_step(local, elements);
      world.barrier();
    }
  }

  void outer_step(Simulated& local, const std::vector<size_t>& elements) const {
    const auto lr = float(sync_.lr()), momentum = float(sync_.momentum()),
               mix = float(sync_.local_share());
    for (const size_t i : elements) {
      float mean = 0;
      for (const Simulated& s : all_) mean += s.sent[i];
      mean /= float(learners_);
      float& v = local.momentum[i];
      v = momentum * v + mean;
      local.anchor[i] -= lr * (momentum > 0 && sync_.outer_nesterov ? mean + momentum * v : v);
      local.weights[i] =
          sync_.delay == 0 ? local.anchor[i] : mix * local.weights[i] + (1 - mix) * local.anchor[i];
    }
  }

  TrainConfig config_;
  const SyncConfig sync_;
  const int learners_;
  const std::unique_ptr<const TokenSource> source_;
  std::vector<Simulated> all_;
  std::vector<Parameter> list_;
};

struct SyncCase {
  int learners = 2;
  std::vector<std::string> keys = {};
  int steps = 6;
  std::string config = "tiny.toml";
  int tp = 1, inner_dp = 1;
};

TrainRequest make_request(const SyncCase& c, const std::string& out) {
  std::vector<std::string> keys{"train.steps=" + std::to_string(c.steps),
                                "train.seq=16",
                                "train.batch=12",
                                "optimizer.warmup=0",
                                "parallel.dp_bucket_mib=0.03",
                                "checkpoint.every=" + std::to_string(c.steps),
                                "sync.method=local",
                                "sync.learners=" + std::to_string(c.learners)};
  keys.insert(keys.end(), c.keys.begin(), c.keys.end());
  return request_for({c.tp, c.learners * c.inner_dp}, out, keys, c.config);
}

void expect_same(const Tensors& found, const Tensors& expected, const std::string& what) {
  ASSERT_EQ(found.size(), expected.size()) << what;
  for (const auto& [name, values] : expected) {
    EXPECT_TRUE(found.at(name) == values) << what << ": " << name;
  }
}

void check_case(const SyncCase& c) {
  const TempDir dir;
  const TrainRequest request = make_request(c, dir / "out");
  const Learners expected = Simulation(request).run();
  run_on_threads(request);
  const std::string checkpoint = checkpoint_path(dir / "out", c.steps);
  for (const std::string& folder : {std::string(dir / "out") + "/final", checkpoint}) {
    const std::string file = folder + "/model.safetensors";
    expect_same(read_tensors(file, "", expected.anchor), expected.anchor, "anchor");
  }
  for (int learner = 0; learner < c.learners; ++learner) {
    const std::string prefix = fmt::format("learner.{}.", learner);
    expect_same(read_tensors(checkpoint + "/optimizer.safetensors", prefix, expected.anchor),
                expected.weights[size_t(learner)], prefix);
  }
}

TEST(OuterSync, HasTheBitsOfSimulatedLearners) {
  const std::vector<SyncCase> cases{
      {.keys = {"sync.every=2"}},
      {.learners = 3, .keys = {"sync.every=3", "sync.outer.nesterov=false"}, .steps = 7},
      {.keys = {"sync.every=1", "sync.outer.lr=1", "sync.outer.momentum=0"}, .steps = 3},
      {.keys = {"sync.every=4", "sync.fragments=2"}, .steps = 9},
      {.keys = {"sync.every=4", "sync.fragments=2", "sync.delay=1"}, .steps = 9},
      {.learners = 3, .keys = {"sync.every=3", "sync.delay=2", "sync.mix=0.25"}, .steps = 8},
      {.keys = {"sync.every=2"}, .steps = 4, .config = "moe.toml"},
  };
  for (const SyncCase& c : cases) {
    SCOPED_TRACE(fmt::format("{} learners, {}", c.learners, fmt::join(c.keys, " ")));
    check_case(c);
  }
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

}  // namespace
}  // namespace tandem
