// Gradient descent, Scaffnew, CompressedScaffnew and TAMUNA against a dense reference, their
// convergence, the numbers that they send, and controls that must fail.
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "fit/draws.h"
#include "fit/problem/vectors.h"
#include "tandem/error.h"
#include "tests/fit/problems.h"

namespace tandem::fit {
namespace {

using test::make_contrasts;
using test::make_data;
using test::run;

struct Params {
  int cohort, sparsity;
  double p;
};

/// The algorithm as published, with a dense mask, one round after another.
Vector reference_rounds(const Problem& problem, const Params& params, uint64_t seed, int rounds) {
  const int n = problem.clients();
  const size_t d = problem.features();
  const double step = 2 / (problem.max_smoothness() + problem.l2());
  const int c = params.cohort, s = params.sparsity;
  const double eta = params.p * c * (s - 1) / double(s * (c - 1));
  Vector mean(d, 0.0);
  std::vector<Vector> h(size_t(n), Vector(d, 0.0));
  for (int round = 1; round <= rounds; ++round) {
    Draws draws(seed, "fit cohort", round);
    std::vector<int> cohort(static_cast<size_t>(n));
    std::iota(cohort.begin(), cohort.end(), 0);
    draws.shuffle(cohort);
    const int64_t steps = draws.geometric(params.p);
    std::vector<std::vector<int>> mask(d, std::vector<int>(size_t(c), 0));
    for (size_t k = 0, at = 0; k < d; ++k)
      for (int t = 0; t < s; ++t) mask[k][at++ % size_t(c)] = 1;
    std::vector<Vector> x(size_t(c), mean);
    for (int j = 0; j < c; ++j) {
      const size_t i = size_t(cohort[size_t(j)]);
      for (int64_t l = 0; l < steps; ++l) {
        Vector gradient(d);
        problem.client(int(i)).gradient(x[size_t(j)], gradient);
        for (size_t k = 0; k < d; ++k) x[size_t(j)][k] -= step * (gradient[k] - h[i][k]);
      }
    }
    for (size_t k = 0; k < d; ++k) {
      double sum = 0;
      for (int j = 0; j < c; ++j) sum += mask[k][size_t(j)] * x[size_t(j)][k];
      mean[k] = sum / s;
      for (int j = 0; j < c; ++j)
        h[size_t(cohort[size_t(j)])][k] +=
            eta / step * mask[k][size_t(j)] * (mean[k] - x[size_t(j)][k]);
    }
  }
  return mean;
}

/// Value of the objective where `method` is after `rounds`.
double value_after(const std::string& method, const Problem& problem, FitOptions options,
                   int rounds) {
  options.max_rounds = rounds;
  options.tol = 0;
  return run(method, problem, options, 2).last.objective;
}

FitOptions options_for(Loss loss, int clients, double kappa = 30) {
  return {.loss = loss,
          .l2 = {.kappa = kappa},
          .clients = clients,
          .seed = 3,
          .tol = 1e-10,
          .max_rounds = 5000};
}

class LocalStepsTest : public testing::TestWithParam<Loss> {};

TEST_P(LocalStepsTest, MatchDenseReference) {
  constexpr int kRounds = 7;
  for (const int clients : {4, 7}) {
    const FitOptions options = options_for(GetParam(), clients);
    const Problem problem(make_data({}, GetParam()), "generated", options);
    const auto compare = [&](const char* method, const FitOptions& given, const Params& params) {
      const Vector x = reference_rounds(problem, params, options.seed, kRounds);
      const double expected = problem.value(x);
      EXPECT_NEAR(value_after(method, problem, given, kRounds), expected, 1e-12 * (1 + expected))
          << method << ", " << clients << " clients";
    };
    FitOptions given = options;
    given.p = 0.4;
    compare("scaffnew", given, {clients, clients, 0.4});
    for (const int s : {2, 3}) {
      given.sparsity = s;
      compare("compressed-scaffnew", given, {clients, s, 0.4});
      given.cohort = 3;
      compare("tamuna", given, {3, s, 0.4});
      given.cohort.reset();
    }
  }
}

TEST_P(LocalStepsTest, GradientDescentMatchesItsFormula) {
  const FitOptions options = options_for(GetParam(), 5);
  const Problem problem(make_data({}, GetParam()), "generated", options);
  Vector x(12, 0.0), gradient(12);
  for (int i = 0; i < 6; ++i) {
    problem.whole().gradient(x, gradient);
    add_scaled(x, -2 / (problem.smoothness() + problem.l2()), gradient);
  }
  EXPECT_NEAR(value_after("gd", problem, options, 6), problem.value(x), 1e-12);
}

TEST_P(LocalStepsTest, ConvergeToTheExactAnswer) {
  const FitOptions options = options_for(GetParam(), 16);
  const Problem problem(make_data({}, GetParam()), "generated", options);
  FitOptions sparse = options;
  sparse.sparsity = 4;
  FitOptions cohort = options;
  cohort.cohort = 2;  // an eighth of the clients
  const FitRun gd = run("gd", problem, options), scaffnew = run("scaffnew", problem, options),
               compressed = run("compressed-scaffnew", problem, sparse),
               tamuna = run("tamuna", problem, cohort);
  for (const FitRun* each : {&gd, &scaffnew, &compressed, &tamuna}) {
    EXPECT_TRUE(each->reached_tol);
    EXPECT_LE(each->last.distance, 1e-10);
    EXPECT_NEAR(each->last.objective, problem.optimal_value(), 1e-12);
  }
}

TEST_P(LocalStepsTest, ControlsStall) {
  FitOptions options = options_for(GetParam(), 16);
  options.control = true;
  options.max_rounds = 2000;
  const Problem problem(make_data({}, GetParam()), "generated", options);
  FitOptions cohort = options;
  cohort.cohort = 4;
  EXPECT_GT(run("scaffnew", problem, options).last.distance, 1e-3);
  EXPECT_GT(run("tamuna", problem, cohort).last.distance, 1e-3);
  EXPECT_GT(run("compressed-scaffnew", problem, options).last.distance, 1e-3);
}

TEST_P(LocalStepsTest, ProximalGradientDescentReachesTheL1Answer) {
  FitOptions options = options_for(GetParam(), 4);
  options.l1 = 0.02;
  const Problem problem(make_data({}, GetParam()), "generated", options);
  EXPECT_TRUE(run("gd", problem, options).reached_tol);
}

TEST_P(LocalStepsTest, ProximalGradientDescentNeedsNoL2) {
  FitOptions options = options_for(GetParam(), 4);
  options.l1 = 0.02;
  options.l2 = {};
  const Problem problem(make_data({}, GetParam()), "generated", options);
  EXPECT_TRUE(run("gd", problem, options).reached_tol);
  if (GetParam() == Loss::squared) {
    options.step = 2 / 1.8;  // 2 / L: the control
    EXPECT_FALSE(run("gd", problem, options).reached_tol);
  }
}

TEST_P(LocalStepsTest, RowsWhoseFeaturesSumToZeroConverge) {
  const FitOptions options = options_for(GetParam(), 4);
  const Problem problem(make_contrasts(96, 6, GetParam()), "generated", options);
  for (const char* method : {"gd", "scaffnew", "compressed-scaffnew", "tamuna"})
    EXPECT_TRUE(run(method, problem, options).reached_tol) << method;
}

INSTANTIATE_TEST_SUITE_P(, LocalStepsTest, testing::Values(Loss::logistic, Loss::squared));

TEST(LocalStepsCountTest, FloatsAndBytesAreThoseOfTheFormulas) {
  constexpr int64_t kRounds = 9, kClients = 8, kFeatures = 13;
  FitOptions options{.l2 = {.kappa = 50}, .clients = kClients, .tol = 0, .max_rounds = kRounds};
  const Problem problem(make_data({.features = kFeatures}, Loss::logistic), "generated", options);
  const auto check = [&](const char* method, int64_t up, int64_t down, int64_t floats) {
    for (const int ranks : {1, 3}) {
      const FitPoint last = run(method, problem, options, ranks).last;
      EXPECT_EQ(last.rounds, kRounds) << method;
      EXPECT_EQ(last.floats.up, kRounds * up) << method;
      EXPECT_EQ(last.floats.down, kRounds * down) << method;
      EXPECT_EQ(last.bytes_sent, kRounds * floats * 8) << method;
    }
  };
  check("gd", 13, 13, 2 * 8 * 13);
  check("scaffnew", 13, 13, 2 * 8 * 13);
  options.sparsity = 3;  // 39 of 104 values: at most 5 of a client's 13
  check("compressed-scaffnew", 5, 13, 39 + 8 * 13);
  options.cohort = 4;  // 39 of 52 values: at most 10 of a client's 13
  check("tamuna", 10, 13 + 10, 39 + 4 * 13 + 39);
}

TEST(LocalStepsFailureTest, LostClientComesBackToTheExactAnswer) {
  FitOptions options = options_for(Loss::logistic, 8);
  options.cohort = 4;
  const Problem problem(make_data({}, Loss::logistic), "generated", options);
  options.failures = {{2, 5, 60}, {7, 20, 90}};
  EXPECT_TRUE(run("tamuna", problem, options, 2).reached_tol);
  options.failures = {{2, 5, 1 << 30}};  // its rows are lost: the run ends, elsewhere
  options.max_rounds = 600;
  const FitRun lost = run("tamuna", problem, options, 2);
  EXPECT_FALSE(lost.reached_tol);
  EXPECT_LT(lost.last.distance, 1);
  options.failures = {{0, 9, 9}, {1, 9, 9}, {2, 9, 9}, {3, 9, 9}, {4, 9, 9}};
  EXPECT_THROW(run("tamuna", problem, options, 2), Error);
}

TEST(LocalStepsOptionsTest, SizesOutOfRangeAreRefused) {
  const auto refuses = [](const char* method, auto change) {
    FitOptions options = options_for(Loss::logistic, 8);
    EXPECT_NO_THROW(test::check(method, options));
    change(options);
    EXPECT_THROW(test::check(method, options), InvalidArgument) << method;
  };
  refuses("tamuna", [](FitOptions& o) { o.cohort = 9; });
  refuses("tamuna", [](FitOptions& o) { o.cohort = 1; });
  refuses("tamuna", [](FitOptions& o) { o.cohort = 4, o.sparsity = 5; });
  refuses("tamuna", [](FitOptions& o) { o.sparsity = 1; });
  refuses("compressed-scaffnew", [](FitOptions& o) { o.sparsity = 9; });
  refuses("scaffnew", [](FitOptions& o) { o.p = 0; });
  refuses("scaffnew", [](FitOptions& o) { o.p = 1.5; });
  refuses("tamuna", [](FitOptions& o) { o.p = std::nan(""); });
  for (const char* method : {"scaffnew", "compressed-scaffnew", "tamuna"})
    refuses(method, [](FitOptions& o) { o.clients = 1; });
}

TEST(RanksTest, ResultsHaveTheSameBitsForAnyNumberOfRanks) {
  FitOptions options = options_for(Loss::logistic, 7);
  options.max_rounds = 40;
  const Problem problem(make_data({}, Loss::logistic), "generated", options);
  for (const MethodRow& row : methods()) {
    const char* method = row.name;
    const FitRun one = run(method, problem, options, 1);
    for (const int ranks : {2, 3, 4}) {
      const FitRun many = run(method, problem, options, ranks);
      ASSERT_EQ(many.history.size(), one.history.size());
      for (size_t i = 0; i < one.history.size(); ++i) {
        EXPECT_EQ(many.history[i].distance, one.history[i].distance) << method << " " << ranks;
        EXPECT_EQ(many.history[i].objective, one.history[i].objective) << method << " " << ranks;
        EXPECT_EQ(many.history[i].bytes_sent, one.history[i].bytes_sent) << method << " " << ranks;
      }
    }
  }
}

}  // namespace
}  // namespace tandem::fit
