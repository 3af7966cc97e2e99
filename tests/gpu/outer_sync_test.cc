// Learners on GPU ranks against CPU ranks: the outer step's kernels, and exchanges in every form of
// message, bit for bit.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "comm/exec.h"
#include "core/host_copy.h"
#include "engine/parallel/sync/demo.h"
#include "engine/parallel/sync/outer_sync.h"
#include "kernels/elementwise.h"
#include "kernels/outer_step.h"
#include "tandem/random.h"
#include "tests/gpu/kernel_operands.h"

namespace tandem::test {
namespace {

class GpuOuterStep : public OnGpus {};
INSTANTIATE_TEST_SUITE_P(Gpu, GpuOuterStep, ::testing::Values(1), gpus_name);

TEST_P(GpuOuterStep, KernelsHaveTheBitsOfTheCpu) {
  run([](Communicator& comm) {
    for (const int64_t size : {0, 1, 255, 4099, 100001}) {
      const auto values = [size](const char* name) { return vector(name, DType::f32, size); };
      expect_equal(comm, "subtract", {values("x"), values("y"), exact(values("difference"))},
                   [](const Exec& exec, const TensorList& t) { subtract(exec, t[0], t[1], t[2]); });
      expect_equal(comm, "divide", {exact(values("values"))},
                   [](const Exec& exec, const TensorList& t) { divide(exec, t[0], 3); });
      expect_equal(comm, "scale", {values("values"), exact(values("scaled"))},
                   [](const Exec& exec, const TensorList& t) { scale(exec, t[0], 0.3f, t[1]); });
      expect_equal(comm, "take_signs", {exact(values("values"))},
                   [](const Exec& exec, const TensorList& t) { take_signs(exec, t[0]); });
      expect_equal(
          comm, "step_along", {values("direction"), exact(values("weights"))},
          [](const Exec& exec, const TensorList& t) { step_along(exec, t[0], 0.3f, t[1]); });
      for (const float mix : {0.0f, 0.3f}) {
        for (const bool nesterov : {false, true}) {
          const OuterConstants step{0.7f, 0.9f, nesterov, mix};
          expect_equal(comm, "outer_step",
                       {values("mean"), exact(values("weights")), exact(values("anchor")),
                        exact(values("velocity"))},
                       [&](const Exec& exec, const TensorList& t) {
                         outer_step(exec, step, t[0], {t[1], t[2], t[3]});
                       });
        }
        expect_equal(comm, "outer_step without momentum",
                     {values("mean"), exact(values("weights")), exact(values("anchor"))},
                     [&](const Exec& exec, const TensorList& t) {
                       outer_step(exec, {0.7f, 0, false, mix}, t[0], {t[1], t[2], {}});
                     });
      }
    }
  });
}

/// w -= gradient, which has the same bits on every device.
void descend(const Exec& exec, const AdamStep& /*step*/, bool /*decay*/, double /*trust_ratio*/,
             const AdamState& state, const Tensor& gradient, const Tensor& working) {
  subtract(exec, state.w, gradient, state.w);
  if (working.data()) cast(exec, state.w, working);
}
const Optimizer kDescent{"descent", descend};

/// Matrices, and vectors that tensor-parallel ranks would have a copy of; of odd sizes, so that
/// fragments, buckets and shards begin anywhere.
std::vector<Parameter> parameters() {
  struct Shape {
    const char* name;
    int64_t rows, columns;
  };
  std::vector<Parameter> list;
  int64_t offset = 0;
  for (const Shape& s : {Shape{"embedding", 299, 64},
                         {"norm", 1, 65},
                         {"up", 129, 33},
                         {"down", 33, 129},
                         {"last_norm", 1, 7},
                         {"head", 100, 61}}) {
    const bool is_vector = s.rows == 1;
    Parameter p{.name = s.name, .shape = {s.rows, s.columns}, .offset = offset};
    if (is_vector) p.shape = {s.columns};
    p.sharding = is_vector ? Sharding{.count = s.columns} : Sharding{.tp_dim = 0, .count = s.rows};
    p.row_stride = s.columns;
    list.push_back(p);
    offset += s.rows * s.columns;
  }
  return list;
}

struct Case {
  const char* name;
  SyncConfig sync;
  int inner_dp = 1;      ///< ranks of a learner
  bool has_f32 = true;   ///< weights are in f32 on every rank, not only at their owners
  int64_t resumed = -1;  ///< after this step exchanges begin again with what was sent
  bool averages = true;  ///< at the end
};

/// State of one rank.
struct Learned {
  std::vector<float> weights, anchor, momentum, unsent;  ///< of its shards, 0 elsewhere
  std::vector<float> all_weights;                        ///< in f32, if the rank has them
  uint64_t sent_bytes = 0;

  bool operator==(const Learned&) const = default;
};

constexpr int64_t kSteps = 9;
constexpr float kRate = 0.01f;

/// In a round with a quorum, after step 4.
std::vector<int> late_learners(int64_t step) {
  return step == 4 ? std::vector{1} : std::vector<int>();
}

class Learner {
 public:
  Learner(Communicator& comm, const Case& c)
      : comm_(comm),
        case_(c),
        exec_(make_exec(comm)),
        list_(parameters()),
        count_(local_range(list_.back()).end()),
        weights_(bytes(), exec_.device),
        gradients_(bytes(), exec_.device),
        working_(bytes() / 2, exec_.device),
        exact_(bytes(), exec_.device),
        replicas_(comm.split(comm.rank() / c.inner_dp, comm.rank())),
        learners_(comm.split(comm.rank() % c.inner_dp, comm.rank())) {
    views_.working = working_.view(DType::bf16, {count_});
    if (c.has_f32) {
      views_.f32 = weights_.view(DType::f32, {count_});
      return;
    }
    views_.exact = exact_.view(DType::f32, {count_});
    for (const Parameter& p : list_) {
      if (p.sharding.over_tp()) continue;
      views_.exact_ranges.push_back({p.offset, p.sharding.count, p.offset});
    }
  }

  Learned run() {
    const Tensor gradients = gradients_.view(DType::f32, {count_});
    ShardedOptimizer optimizer(exec_, views_, gradients, {{*replicas_, {0, count_}, list_}}, 5000,
                               {.optimizer = case_.sync.is_demo() ? kDemoOptimizer : kDescent,
                                .outer = outer_moments(case_.sync)});
    load(1000, 1, weights_);
    optimizer.adopt_weights(weights_.view(DType::f32, {count_}));
    std::optional<OuterSync> sync;
    const auto begin = [&](int64_t step) {
      OuterSync::LateLearners late;
      if (case_.sync.has_quorum()) late = late_learners;
      sync.emplace(*learners_, case_.sync, std::vector<OuterSync::Stage>{{exec_, optimizer, list_}},
                   step, late);
    };
    begin(0);
    Learned learned;
    for (int64_t step = 1; step <= kSteps; ++step) {
      load(uint64_t(step * 16 + comm_.rank()), 0.01f, gradients_);
      optimizer.ready({0, count_});
      optimizer.reduce();
      AdamStep update;
      update.lr = kRate;
      optimizer.update(update);
      optimizer.await_all();
      if (sync->after_update(step, kRate)) {
        optimizer.gather_weights();
        optimizer.await_all();
      }
      learned.sent_bytes += sync->take_sent();
      if (step == case_.resumed) begin(step);
    }
    learned.weights = read(optimizer, Moment::weights);
    if (case_.has_f32) learned.all_weights = values_of(weights_.view(DType::f32, {count_}));
    if (case_.averages) sync->average_weights(kSteps);
    learned.anchor = read(optimizer, Moment::anchor);
    learned.momentum = read(optimizer, Moment::outer_momentum);
    learned.unsent = read(optimizer, Moment::unsent);
    return learned;
  }

 private:
  size_t bytes() const { return size_t(count_) * sizeof(float); }

  /// Sets f32 values that are the same on every device.
  void load(uint64_t seed, float scale, const Memory& memory) const {
    std::vector<float> values(static_cast<size_t>(count_));
    for (size_t i = 0; i < values.size(); ++i) values[i] = scale * normal(seed, 0, i);
    copy(exec_, host_tensor(values), memory.view(DType::f32, {count_}));
  }

  std::vector<float> values_of(const Tensor& values) const {
    const HostCopy copied(exec_, values);
    return {copied.values().begin(), copied.values().end()};
  }

  std::vector<float> read(const ShardedOptimizer& optimizer, Moment moment) const {
    std::vector<float> all(static_cast<size_t>(count_));
    for (const StateSlice& slice : optimizer.slices(moment)) {
      std::ranges::copy(values_of(slice.values), all.begin() + slice.begin);
    }
    return all;
  }

  Communicator& comm_;
  const Case& case_;
  const Exec exec_;
  const std::vector<Parameter> list_;
  const int64_t count_;
  const Memory weights_, gradients_, working_, exact_;
  WeightViews views_;
  const std::unique_ptr<Communicator> replicas_, learners_;
};

/// First element that differs, by name; empty if there is none.
std::string first_difference(const Learned& found, const Learned& expected) {
  for (const auto& [name, values] :
       {std::pair("weights", &Learned::weights), std::pair("anchor", &Learned::anchor),
        std::pair("momentum", &Learned::momentum), std::pair("unsent", &Learned::unsent),
        std::pair("gathered weights", &Learned::all_weights)}) {
    for (size_t i = 0; i < (expected.*values).size(); ++i) {
      const float left = (found.*values).at(i), right = (expected.*values)[i];
      if (left != right) return fmt::format("{}[{}] is {}: expected {}", name, i, left, right);
    }
  }
  return found.sent_bytes == expected.sent_bytes
             ? ""
             : fmt::format("sent {} bytes: expected {}", found.sent_bytes, expected.sent_bytes);
}

class GpuOuterSync : public OnGpus {
 protected:
  void expect_same_bits(const Case& c) {
    SCOPED_TRACE(c.name);
    const std::vector<Learned> expected = learn(false, c), found = learn(true, c);
    for (int rank = 0; rank < ranks(); ++rank) {
      EXPECT_EQ(first_difference(found[size_t(rank)], expected[size_t(rank)]), "")
          << "rank " << rank;
      const Learned& first = found[size_t(rank % c.inner_dp)];
      EXPECT_EQ(found[size_t(rank)].anchor, first.anchor) << "learners 0 and " << rank / c.inner_dp;
    }
  }
  std::vector<Learned> learn(bool on_gpus, const Case& c) {
    std::mutex mutex;
    std::vector<Learned> all(static_cast<size_t>(ranks()));
    const auto body = [&](Communicator& comm) {
      Learned learned = Learner(comm, c).run();
      const std::lock_guard lock(mutex);
      all[size_t(comm.rank())] = std::move(learned);
    };
    WorldOptions threads;
    threads.ranks = ranks();
    on_gpus ? run(body, 60) : run_threads(threads, body);
    return all;
  }
};
INSTANTIATE_TEST_SUITE_P(Gpu, GpuOuterSync, ::testing::Values(2, 4), gpus_name);
/// On one GPU nine ranks are two teams, which do not reach each other's memory, as on two hosts.
class GpuOuterSyncTeams : public GpuOuterSync {};
INSTANTIATE_TEST_SUITE_P(Gpu, GpuOuterSyncTeams, ::testing::Values(9), gpus_name);

SyncConfig local(int learners) {
  SyncConfig sync;
  sync.method = "local";
  sync.learners = learners;
  sync.every = 2;
  return sync;
}

SyncConfig sparse(SyncConfig sync) {
  sync.topk = 0.03;
  return sync;
}

SyncConfig in_codec(SyncConfig sync, const char* codec) {
  sync.codec = codec;
  return sync;
}

/// Two fragments, each applied a step after it was sent.
SyncConfig streamed(SyncConfig sync) {
  sync.every = 4;
  sync.fragments = 2;
  sync.delay = 1;
  return sync;
}

TEST_P(GpuOuterSync, HasTheBitsOfCpuRanks) {
  const SyncConfig all = local(ranks()), pairs = local(2);
  SyncConfig without_momentum = all;
  without_momentum.outer_momentum = 0;
  SyncConfig late = in_codec(all, "int4:g32"), late_streamed = streamed(all);
  late.quorum = late_streamed.quorum = ranks() - 1;
  std::vector<Case> cases{
      {"f32", all},
      {"f32 without momentum", without_momentum},
      {"int4", in_codec(all, "int4:g32")},
      {"int2 with spikes", in_codec(all, "int2:g64:asym:spikes")},
      {"topk", sparse(all)},
      {"int8 in fragments with a delay", streamed(in_codec(all, "int8"))},
      {"bf16 weights", in_codec(all, "int4:g32"), 1, false},
      {"bf16 weights, topk, fragments, delay", streamed(sparse(all)), 1, false},
      {"a late learner", late, 1, false},
      {"a late learner, topk, delay", sparse(late_streamed), 1, true},
      {"begun again with a fragment in flight", streamed(in_codec(all, "int4:g32")), 1, true, 6},
  };
  if (ranks() == 4) {
    cases.push_back({"two replicas", in_codec(pairs, "int4:g32"), 2});
    cases.push_back({"two replicas, bf16 weights, delay", streamed(pairs), 2, false});
  }
  for (const Case& c : cases) expect_same_bits(c);
}

TEST_P(GpuOuterSyncTeams, MessagesThroughHostsHaveTheBitsOfCpuRanks) {
  const SyncConfig all = in_codec(local(ranks()), "int4:g32");
  expect_same_bits({.name = "at once", .sync = all, .averages = false});
  expect_same_bits({.name = "under steps", .sync = streamed(all), .averages = false});
}

/// Transforms are rounded in another order, which changes the signs of values near 0.
TEST_P(GpuOuterSync, DemoFollowsTheSignsOfCpuRanks) {
  Case c{"demo", local(ranks())};
  c.sync.method = "demo";
  const std::vector<Learned> expected = learn(false, c), found = learn(true, c),
                             again = learn(true, c);
  for (int rank = 0; rank < ranks(); ++rank) {
    EXPECT_EQ(found[size_t(rank)].anchor, found[0].anchor) << "learners 0 and " << rank;
    EXPECT_EQ(again[size_t(rank)].anchor, found[0].anchor) << "another run, learner " << rank;
  }
  const auto different = [&](const std::vector<float>& other) {
    int count = 0;
    for (size_t i = 0; i < other.size(); ++i) {
      count += std::abs(other[i] - found[0].anchor[i]) > kRate / 2;
    }
    return double(count) / double(other.size());
  };
  EXPECT_LT(different(expected[0].anchor), 0.02);
  c.sync.topk = 8;
  EXPECT_GT(different(learn(true, c)[0].anchor), 0.1) << "control: fewer cosines";
}

TEST_P(GpuOuterSync, AnotherStepGivesOtherWeights) {
  const Case c{"f32", local(ranks())};
  Case other = c;
  other.sync.outer_lr = 0.6;
  EXPECT_NE(learn(true, other)[0].weights, learn(true, c)[0].weights);
  other = c;
  other.sync.every = 100;
  const std::vector<Learned> apart = learn(true, other);
  EXPECT_NE(apart[0].weights, apart[1].weights) << "learners that never exchange";
}

}  // namespace
}  // namespace tandem::test
