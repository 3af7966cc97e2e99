#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <mutex>
#include <numbers>
#include <numeric>
#include <thread>
#include <utility>

#include "engine/config/config.h"
#include "engine/optim/learning_rate.h"
#include "engine/optim/optimizer.h"
#include "engine/parallel/sharded/sharded_optimizer.h"
#include "tandem/error.h"
#include "tandem/random.h"
#include "tests/flat.h"

namespace tandem {
namespace {

TrainConfig config() {
  TrainConfig c;
  c.train.steps = 100;
  c.optimizer.lr = 0.01;
  c.optimizer.min_lr = 0.001;
  c.optimizer.warmup = 10;
  return c;
}

// The textbook update, one element at a time in double.
struct Reference {
  double w, m = 0, v = 0;
  void step(const TrainConfig& c, int64_t t, double lr, double g, bool decay) {
    const auto& o = c.optimizer;
    m = o.beta1 * m + (1 - o.beta1) * g;
    v = o.beta2 * v + (1 - o.beta2) * g * g;
    const double mhat = m / (1 - std::pow(o.beta1, double(t) + 1));
    const double vhat = v / (1 - std::pow(o.beta2, double(t) + 1));
    w -= lr * (mhat / (std::sqrt(vhat) + o.eps) + (decay ? o.weight_decay * w : 0));
  }
};

TEST(AdamW, MatchesTheReference) {
  const TrainConfig c = config();
  for (const bool decay : {true, false}) {
    for (size_t count : {1, 7, 64, 1000}) {
      std::vector<float> w(count), g(count), m(count), v(count);
      std::vector<Reference> reference;
      for (size_t i = 0; i < count; ++i) reference.push_back({w[i] = normal(1, 1, i)});
      for (int64_t t = 0; t < 20; ++t) {
        for (size_t i = 0; i < count; ++i) {
          g[i] = normal(1, uint64_t(t) + 2, i);
          reference[i].step(c, t, 0.01, g[i], decay);
        }
        adamw({}, AdamStep::make(c.optimizer, t, 0.01, 0), decay, {flat(w), flat(m), flat(v)},
              flat(g));
      }
      for (size_t i = 0; i < count; ++i) EXPECT_NEAR(w[i], reference[i].w, 2e-5);
    }
  }
}

TEST(AdamW, ClipsByTheGlobalNorm) {
  EXPECT_FLOAT_EQ(AdamStep::make(config().optimizer, 0, 0.1, 4).gradient_scale, 0.25f);
  EXPECT_FLOAT_EQ(AdamStep::make(config().optimizer, 0, 0.1, 0.5).gradient_scale, 1);
}

TEST(AdamW, SumOfSquaresMatchesReference) {
  for (size_t count : {0, 1, 15, 16, 17, 1000}) {
    std::vector<float> values(count);
    double expected = 0;
    for (size_t i = 0; i < count; ++i) {
      values[i] = normal(3, 3, i);
      expected += double(values[i]) * double(values[i]);
    }
    EXPECT_NEAR(sum_of_squares(flat(values)), expected, 1e-9 * (1 + expected));
  }
}

TEST(LearningRate, CosineStartsAtThePeakAfterTheWarmUp) {
  const TrainConfig c = config();  // 10 of 100 steps
  EXPECT_DOUBLE_EQ(learning_rate(c.optimizer, c.train, 0, 0, 0), 0.001);
  EXPECT_DOUBLE_EQ(learning_rate(c.optimizer, c.train, 9, 0, 0), 0.01);
  EXPECT_DOUBLE_EQ(learning_rate(c.optimizer, c.train, 10, 0, 0), 0.01);
  EXPECT_DOUBLE_EQ(learning_rate(c.optimizer, c.train, 55, 0, 0), 0.0055);
  EXPECT_DOUBLE_EQ(learning_rate(c.optimizer, c.train, 100, 0, 0), 0.001);
  for (int step = 11; step <= 100; ++step) {
    EXPECT_LT(learning_rate(c.optimizer, c.train, step, 0, 0),
              learning_rate(c.optimizer, c.train, step - 1, 0, 0));
  }
}

TEST(LearningRate, CosineOfATimedRunStartsWhenTheWarmUpEnds) {
  TrainConfig c = config();
  c.train.seconds = 50;
  EXPECT_DOUBLE_EQ(learning_rate(c.optimizer, c.train, 9, 20, 0), 0.01);
  EXPECT_DOUBLE_EQ(learning_rate(c.optimizer, c.train, 10, 20, 20), 0.01);
  EXPECT_DOUBLE_EQ(learning_rate(c.optimizer, c.train, 30, 35, 20), 0.0055);
  EXPECT_DOUBLE_EQ(learning_rate(c.optimizer, c.train, 40, 50, 20), 0.001);
  EXPECT_DOUBLE_EQ(learning_rate(c.optimizer, c.train, 41, 55, 20), 0.001);
  c.train.seconds = 15;  // the warm-up took longer
  EXPECT_DOUBLE_EQ(learning_rate(c.optimizer, c.train, 10, 20, 20), 0.001);
}

/// Warm-up of 10 of 100 steps, peak 0.01, minimum 0.001.
TrainConfig with_schedule(const std::string& schedule) {
  TrainConfig c = config();
  c.optimizer.schedule = schedule;
  return c;
}

TEST(LearningRate, SchedulesWarmUpAlikeAndBeginAtThePeak) {
  for (const char* schedule : {"constant", "linear", "cosine", "wsd", "inverse-sqrt"}) {
    TrainConfig c = with_schedule(schedule);
    EXPECT_DOUBLE_EQ(learning_rate(c.optimizer, c.train, 0, 0, 0), 0.001) << schedule;
    EXPECT_DOUBLE_EQ(learning_rate(c.optimizer, c.train, 9, 0, 0), 0.01) << schedule;
    EXPECT_DOUBLE_EQ(learning_rate(c.optimizer, c.train, 10, 0, 0), 0.01) << schedule;
    c.optimizer.warmup = 0;
    EXPECT_DOUBLE_EQ(learning_rate(c.optimizer, c.train, 0, 0, 0), 0.01) << schedule;
  }
}

TEST(LearningRate, SchedulesMatchTheirClosedForms) {
  const TrainConfig constant = with_schedule("constant"), linear = with_schedule("linear");
  EXPECT_DOUBLE_EQ(learning_rate(constant.optimizer, constant.train, 99, 0, 0), 0.01);
  EXPECT_DOUBLE_EQ(learning_rate(constant.optimizer, constant.train, 1000, 0, 0), 0.01);
  EXPECT_DOUBLE_EQ(learning_rate(linear.optimizer, linear.train, 11, 0, 0), 0.01 - 0.009 / 90);
  EXPECT_DOUBLE_EQ(learning_rate(linear.optimizer, linear.train, 55, 0, 0), 0.0055);
  EXPECT_DOUBLE_EQ(learning_rate(linear.optimizer, linear.train, 99, 0, 0), 0.001 + 0.009 / 90);
  EXPECT_DOUBLE_EQ(learning_rate(linear.optimizer, linear.train, 100, 0, 0), 0.001);

  TrainConfig wsd = with_schedule("wsd");
  wsd.optimizer.decay_fraction = 1.0 / 3;  // 30 of 90 steps, from step 70
  EXPECT_DOUBLE_EQ(learning_rate(wsd.optimizer, wsd.train, 69, 0, 0), 0.01);
  EXPECT_DOUBLE_EQ(learning_rate(wsd.optimizer, wsd.train, 70, 0, 0), 0.01);
  EXPECT_DOUBLE_EQ(learning_rate(wsd.optimizer, wsd.train, 71, 0, 0), 0.01 - 0.009 / 30);
  EXPECT_DOUBLE_EQ(learning_rate(wsd.optimizer, wsd.train, 85, 0, 0), 0.0055);
  EXPECT_DOUBLE_EQ(learning_rate(wsd.optimizer, wsd.train, 100, 0, 0), 0.001);
  wsd.optimizer.decay_fraction = 1;
  EXPECT_DOUBLE_EQ(learning_rate(wsd.optimizer, wsd.train, 55, 0, 0),
                   learning_rate(linear.optimizer, linear.train, 55, 0, 0));
  wsd.train.seconds = 50;  // 30 s after a warm-up of 20 s
  wsd.optimizer.decay_fraction = 0.5;
  EXPECT_DOUBLE_EQ(learning_rate(wsd.optimizer, wsd.train, 30, 35, 20), 0.01);
  EXPECT_DOUBLE_EQ(learning_rate(wsd.optimizer, wsd.train, 31, 42.5, 20), 0.0055);

  const TrainConfig inverse = with_schedule("inverse-sqrt");
  EXPECT_DOUBLE_EQ(learning_rate(inverse.optimizer, inverse.train, 40, 0, 0), 0.005);
  EXPECT_DOUBLE_EQ(learning_rate(inverse.optimizer, inverse.train, 90, 0, 0), 0.01 / 3);
  EXPECT_DOUBLE_EQ(learning_rate(inverse.optimizer, inverse.train, 1000, 0, 0), 0.001);
  EXPECT_DOUBLE_EQ(learning_rate(inverse.optimizer, inverse.train, 4000, 0, 0),
                   0.001);  // the minimum
}

TEST(LearningRate, DecaysOfWsdMatchTheirClosedForms) {
  TrainConfig c = with_schedule("wsd");
  c.optimizer.decay_fraction = 1.0 / 3;  // 30 of 90 steps, from step 70
  const std::pair<const char*, double (*)(double)> decays[] = {
      {"linear", [](double d) { return 1 - d; }},
      {"cosine", [](double d) { return (1 + std::cos(std::numbers::pi * d)) / 2; }},
      {"1-sqrt", [](double d) { return 1 - std::sqrt(d); }}};
  for (const auto& [type, left] : decays) {
    c.optimizer.decay_type = type;
    EXPECT_DOUBLE_EQ(learning_rate(c.optimizer, c.train, 69, 0, 0), 0.01) << type;
    for (int64_t step = 70; step <= 100; ++step) {
      const double expected = 0.001 + 0.009 * left(double(step - 70) / 30);
      EXPECT_NEAR(learning_rate(c.optimizer, c.train, step, 0, 0), expected, 1e-9)
          << type << " " << step;
    }
  }
  // Other schedules have their own shape.
  TrainConfig cosine = with_schedule("cosine");
  cosine.optimizer.decay_type = "1-sqrt";
  EXPECT_DOUBLE_EQ(learning_rate(cosine.optimizer, cosine.train, 55, 0, 0), 0.0055);
}

TEST(LearningRate, ShortRunEndsInItsWarmUp) {
  TrainConfig c = config();
  c.train.steps = 5;
  EXPECT_DOUBLE_EQ(learning_rate(c.optimizer, c.train, 4, 0, 0), 0.005);
}

// Two fused matrices whose rows alternate, a padding of 3, and a replicated vector.
std::vector<Parameter> sample_parameters() {
  return {{"a", {20, 6}, {0, 0, 10}, 0, 12, true},
          {"b", {20, 6}, {0, 0, 10}, 6, 12, true},
          {"norm", {7}, {}, 123, 0, false}};
}
constexpr size_t kElements = 132;

TEST(ParameterRuns, MergeNeighboursAndLeavePaddingOut) {
  const std::vector<ParameterRun> expected{{0, 120, true, true}, {123, 7, false, false}};
  EXPECT_EQ(parameter_runs(sample_parameters()), expected);
}

float gradient_of(uint64_t step, int rank, size_t i) {
  const bool padding = (i >= 120 && i < 123) || i >= 130;
  return padding ? 0 : normal(11, step * 64 + uint64_t(rank), i);
}

struct Outcome {
  std::vector<float> parameters, m, v;
  double sharded = 0, replicated = 0;
};

std::vector<float> without_padding(std::vector<float> values) {
  for (size_t i = 0; i < kElements; ++i) {
    if ((i >= 120 && i < 123) || i >= 130) values[i] = 0;
  }
  return values;
}

/// A moment assembled on every rank: the sum of all ranks' shards, each zero elsewhere.
std::vector<float> whole_of(Communicator& comm, ShardedOptimizer& dp, Moment moment) {
  std::vector<float> whole(kElements);
  for (const StateSlice& slice : dp.slices(moment)) {
    std::ranges::copy(floats(slice.values), whole.begin() + slice.begin);
  }
  all_reduce(comm, Tensor(whole.data(), DType::f32, {int64_t(kElements)}));
  return whole;
}

void restore(ShardedOptimizer& dp, Moment moment, const std::vector<float>& whole) {
  for (const StateSlice& slice : dp.slices(moment)) {
    std::copy_n(whole.begin() + slice.begin, slice.values.elements(), floats(slice.values).begin());
  }
}

void pause(uint64_t step, int rank, size_t at) {
  const uint64_t us = philox(step, uint64_t(rank), at)[0] % 4 == 0 ? 2000 : 0;
  std::this_thread::sleep_for(std::chrono::microseconds(us));
}

/// Optimizer of one group of all ranks.
std::unique_ptr<ShardedOptimizer> make_optimizer(Communicator& comm, std::vector<float>& w,
                                                 std::vector<float>& g,
                                                 const std::vector<Parameter>& list,
                                                 int64_t bucket) {
  std::vector<ParameterGroup> groups{{comm, {0, int64_t(w.size())}, list}};
  return std::make_unique<ShardedOptimizer>(Exec{}, flat(w), flat(g), std::move(groups), bucket);
}

/// `delayed`: ranks sleep at random within a step, each at other times.
Outcome run_ranks(int ranks, int64_t bucket, bool resume_midway, bool delayed = false) {
  Outcome outcome;
  std::mutex mutex;
  WorldOptions options;
  options.ranks = ranks;
  run_threads(options, [&](Communicator& comm) {
    std::vector<float> w(kElements), g(kElements);
    for (size_t i = 0; i < kElements; ++i) w[i] = gradient_of(1000, 0, i);
    const auto list = sample_parameters();
    auto dp = make_optimizer(comm, w, g, list, bucket);
    Outcome local;
    for (int64_t step = 0; step < 6; ++step) {
      int64_t reported = kElements;
      for (size_t i = kElements; i-- > 0;) {
        g[i] = gradient_of(uint64_t(step), comm.rank(), i);
        if (i % 17 == 0) {
          if (delayed) pause(uint64_t(step), comm.rank(), i);
          dp->ready({int64_t(i), reported - int64_t(i)});
          reported = int64_t(i);
        }
      }
      if (delayed) pause(uint64_t(step), comm.rank(), kElements);
      const auto squares = dp->reduce();
      if (delayed) pause(uint64_t(step), comm.rank(), kElements + 1);
      local.sharded += squares.sharded, local.replicated += squares.replicated;
      dp->update(AdamStep::make(config().optimizer, step, 0.01, 0));
      for (int64_t begin = 0; begin < int64_t(kElements); begin += 11) {
        if (delayed) pause(uint64_t(step), comm.rank(), size_t(begin));
        dp->await({begin, 11});
      }
      if (!resume_midway || step != 2) continue;
      const auto m = whole_of(comm, *dp, Moment::first), v = whole_of(comm, *dp, Moment::second);
      EXPECT_EQ(whole_of(comm, *dp, Moment::weights), without_padding(w));
      EXPECT_TRUE(dp->slices(Moment::master).empty());
      dp = make_optimizer(comm, w, g, list, bucket + 1);
      restore(*dp, Moment::first, m);
      restore(*dp, Moment::second, v);
    }
    local.m = whole_of(comm, *dp, Moment::first);
    local.v = whole_of(comm, *dp, Moment::second);
    local.parameters = w;
    const std::lock_guard lock(mutex);
    outcome.sharded += local.sharded, outcome.replicated += local.replicated;
    if (comm.rank() == 0) {
      outcome.m = local.m, outcome.v = local.v;
    }
    if (!outcome.parameters.empty()) {
      EXPECT_EQ(outcome.parameters, w);
    }
    outcome.parameters = w;
  });
  return outcome;
}

TEST(ShardedOptimizer, EqualsOneRankThatSumsInRankOrder) {
  for (const int ranks : {1, 2, 3, 4}) {
    std::vector<float> w(kElements), g(kElements), m(kElements), v(kElements);
    double squares = 0;
    for (size_t i = 0; i < kElements; ++i) w[i] = gradient_of(1000, 0, i);
    for (int64_t step = 0; step < 6; ++step) {
      for (size_t i = 0; i < kElements; ++i) {
        g[i] = gradient_of(uint64_t(step), 0, i);
        for (int r = 1; r < ranks; ++r) g[i] += gradient_of(uint64_t(step), r, i);
        squares += double(g[i]) * double(g[i]);
      }
      const AdamStep adam = AdamStep::make(config().optimizer, step, 0.01, 0);
      for (const auto& run : parameter_runs(sample_parameters())) {
        const auto begin = size_t(run.begin), count = size_t(run.count);
        const auto slice = [&](std::vector<float>& values) {
          return flat(std::span(values).subspan(begin, count));
        };
        adamw({}, adam, run.decay, {slice(w), slice(m), slice(v)}, slice(g));
      }
    }
    for (const int64_t bucket : {1, 10, 50, 1000}) {
      for (const bool resume : {false, true}) {
        const Outcome outcome = run_ranks(ranks, bucket, resume);
        for (size_t i = 0; i < kElements; ++i) {
          ASSERT_NEAR(outcome.parameters[i], w[i], 1e-6 + 1e-6 * std::abs(w[i])) << i;
          ASSERT_NEAR(outcome.m[i], m[i], 1e-6) << i;
          ASSERT_NEAR(outcome.v[i], v[i], 1e-6) << i;
        }
        EXPECT_NEAR(outcome.sharded + outcome.replicated, squares, 1e-6 * squares);
        EXPECT_GT(outcome.replicated, 0);
        EXPECT_EQ(run_ranks(ranks, bucket, resume).parameters, outcome.parameters);
      }
    }
  }
}

TEST(ShardedOptimizer, LateRanksChangeNoBitsHoweverManyBucketsAreInFlight) {
  for (const int ranks : {2, 3, 4}) {
    for (const int64_t bucket : {2, 20, 40}) {  // many times a ring, more than one, and all in one
      const Outcome prompt = run_ranks(ranks, bucket, false),
                    late = run_ranks(ranks, bucket, false, true);
      EXPECT_EQ(late.parameters, prompt.parameters);
      EXPECT_EQ(late.m, prompt.m);
      EXPECT_EQ(late.v, prompt.v);
      EXPECT_DOUBLE_EQ(late.sharded, prompt.sharded);
    }
  }
}

// Ranges may be reported in any order, and weights awaited in any pieces.
TEST(ShardedOptimizer, OrderOfReportsAndOfAwaitedRangesChangesNoBits) {
  for (const int ranks : {2, 3}) {
    for (const int64_t bucket : {5, 20, 1000}) {
      const Outcome expected = run_ranks(ranks, bucket, false);
      WorldOptions options;
      options.ranks = ranks;
      run_threads(options, [&](Communicator& comm) {
        std::vector<float> w(kElements), g(kElements);
        for (size_t i = 0; i < kElements; ++i) w[i] = gradient_of(1000, 0, i);
        const auto dp = make_optimizer(comm, w, g, sample_parameters(), bucket);
        for (int64_t step = 0; step < 6; ++step) {
          for (size_t i = 0; i < kElements; ++i) g[i] = gradient_of(uint64_t(step), comm.rank(), i);
          for (int64_t i = 0; i < 12; ++i) dp->ready({(5 * i + step) % 12 * 11, 11});
          dp->reduce();
          dp->update(AdamStep::make(config().optimizer, step, 0.01, 0));
          for (int64_t i = 0; i < 4; ++i) dp->await({(i + step) % 4 * 33, 33});
        }
        EXPECT_EQ(w, expected.parameters);
      });
    }
  }
}

// Sums of squares have one order, whichever group's messages arrive first.
TEST(ShardedOptimizer, LateRanksChangeNoBitsOfTwoGroups) {
  constexpr int64_t kFirst = 61, kAll = 2 * kFirst + 4;
  const std::vector<Parameter> first{{"a", {1, kFirst}, {0, 0, 1}, 0, kFirst, true}};
  const std::vector<Parameter> second{{"b", {1, kAll - kFirst}, {0, 0, 1}, kFirst, kAll, true}};
  std::vector<double> squares;
  std::vector<float> weights;
  for (const bool delayed : {false, true, true}) {
    WorldOptions options;
    options.ranks = 3;
    std::mutex mutex;
    std::vector<double> found(3);
    run_threads(options, [&](Communicator& comm) {
      const auto rank = size_t(comm.rank());
      const auto other = comm.split(0, comm.rank());
      std::vector<float> w(size_t(kAll), 0.5f), g(w.size());
      std::vector<ParameterGroup> groups{{comm, {0, kFirst}, first},
                                         {*other, {kFirst, kAll - kFirst}, second}};
      ShardedOptimizer optimizer({}, flat(w), flat(g), std::move(groups), 7);
      double sum = 0;
      for (int64_t step = 0; step < 4; ++step) {
        for (size_t i = 0; i < w.size(); ++i) g[i] = normal(5, uint64_t(step) * 8 + rank, i);
        for (int64_t at = 0; at < kFirst; ++at) {  // elements of both groups in turn
          if (delayed && at % 7 == 0) pause(uint64_t(step), comm.rank(), size_t(at));
          optimizer.ready({kFirst - 1 - at, 1});
          optimizer.ready({kAll - 1 - at, 1});
        }
        sum += optimizer.reduce().sharded;
        optimizer.update(AdamStep::make(config().optimizer, step, 0.01, 0));
        EXPECT_THROW(optimizer.reduce(), InvalidArgument);  // before the weights are awaited
        optimizer.await_all();
      }
      const std::lock_guard lock(mutex);
      found[rank] = sum;
      if (weights.empty()) weights = w;
      EXPECT_EQ(w, weights);
    });
    if (squares.empty()) squares = found;
    EXPECT_EQ(found, squares);
  }
}

TEST(ShardedOptimizer, RangeOfTwoGroupsIsRefused) {
  run_threads({}, [](Communicator& comm) {
    std::vector<float> w(10), g(10);
    std::vector<ParameterGroup> groups{{comm, {0, 6}, {}}, {comm, {6, 4}, {}}};
    ShardedOptimizer optimizer({}, flat(w), flat(g), std::move(groups), 4);
    EXPECT_NO_THROW(optimizer.ready({6, 4}));
    EXPECT_THROW(optimizer.ready({5, 2}), InvalidArgument);
  });
}

// ZeRO-1: weights and gradients on every rank, moments split over the ranks, and messages that do
// not grow with the model.
TEST(ShardedOptimizer, MemoryIsWithinATenthOfTheFormula) {
  constexpr int64_t kParameters = 1 << 20;
  for (const int ranks : {1, 2, 4}) {
    WorldOptions options;
    options.ranks = ranks;
    run_threads(options, [&](Communicator& comm) {
      std::vector<float> w(kParameters), g(kParameters);
      const auto dp = make_optimizer(comm, w, g, {}, kParameters / 128);
      const double formula = 4.0 + 4.0 + 8.0 / ranks;
      const double measured = double(dp->bytes()) / double(kParameters);
      EXPECT_GE(measured, formula);
      EXPECT_LT(measured, 1.1 * formula);
    });
  }
}

}  // namespace
}  // namespace tandem
