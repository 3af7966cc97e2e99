// proxCSL: updates against a dense reference, a falling objective where plain CSL diverges, and the
// average that it begins with.
#include <gtest/gtest.h>

#include <cmath>

#include "fit/problem/vectors.h"
#include "tests/fit/problems.h"

namespace tandem::fit {
namespace {

using test::make_data;
using test::run;

/// Proximal gradient descent on f + linear . x + alpha / 2 |x - center|^2 + l1 |x|_1.
Vector reference_answer(const Objective& f, const Vector& linear, double alpha,
                        const Vector& center, double l1) {
  const double step = 1 / (f.smoothness() * 1.01 + f.l2() + alpha);
  Vector x(center.size(), 0.0), gradient(x.size());
  for (int i = 0; i < 60000; ++i) {
    f.gradient(x, gradient);
    for (size_t k = 0; k < x.size(); ++k) {
      const double slope = gradient[k] + linear[k] + alpha * (x[k] - center[k]);
      x[k] = soft_threshold(x[k] - step * slope, step * l1);
    }
  }
  return x;
}

FitOptions options_for(Loss loss, int64_t rounds) {
  return {.loss = loss,
          .l1 = 0.02,
          .l2 = {.value = 0.02},
          .clients = 4,
          .tol = 0,
          .max_rounds = rounds};
}

class ProxCslTest : public testing::TestWithParam<Loss> {};

TEST_P(ProxCslTest, RoundsMatchTheReference) {
  const FitOptions options = options_for(GetParam(), 2);
  const Problem problem(make_data({.rows = 40, .features = 6, .entries = 4}, GetParam()),
                        "generated", options);
  const Vector zero(6, 0.0);
  Vector mean(6, 0.0);
  for (int c = 0; c < 4; ++c) {
    add_scaled(mean, 0.25, reference_answer(problem.client(c), zero, 0, zero, problem.l1()));
  }
  EXPECT_NEAR(run("average", problem, options, 2).last.objective, problem.value(mean), 1e-10);
  Vector linear(6), local(6);
  problem.whole().gradient(mean, linear);
  problem.client(0).gradient(mean, local);
  add_scaled(linear, -1, local);
  const auto solve = [&](double alpha) {
    return reference_answer(problem.client(0), linear, alpha, mean, problem.l1());
  };
  double alpha = 1e-4;
  Vector w = solve(alpha);
  while (problem.value(w) >= problem.value(mean) && alpha < 1e3) w = solve(alpha *= 10);
  while (alpha > 1e-8 && alpha <= 1e-4) {
    const Vector smaller = solve(alpha /= 10);
    if (problem.value(smaller) >= problem.value(w)) break;
    w = smaller;
  }
  EXPECT_NEAR(run("proxcsl", problem, options, 2).last.objective, problem.value(w), 1e-9);
}

TEST_P(ProxCslTest, ObjectiveFallsWherePlainCslDiverges) {
  FitOptions options = options_for(GetParam(), 8);
  options.l1 = 0.002;
  options.l2 = {};
  options.clients = 16;
  // 10 rows of a client, 60 features.
  const Problem problem(
      make_data({.rows = 160, .features = 60, .entries = 12, .difference = 0.2}, GetParam()),
      "generated", options);
  const FitRun adaptive = run("proxcsl", problem, options, 2);
  for (size_t i = 2; i < adaptive.history.size(); ++i)
    EXPECT_LT(adaptive.history[i].objective, adaptive.history[i - 1].objective) << i;
  options.control = true;
  const FitRun csl = run("proxcsl", problem, options, 2);
  EXPECT_FALSE(csl.last.objective <= 1.5 * csl.history[1].objective);  // maybe NaN
}

INSTANTIATE_TEST_SUITE_P(, ProxCslTest, testing::Values(Loss::logistic, Loss::squared));

TEST(AverageTest, IsExactForOneClientAndNotForSeveral) {
  FitOptions options = options_for(Loss::logistic, 5);
  options.tol = 1e-10;
  options.clients = 1;
  const Problem one(make_data({}, Loss::logistic), "generated", options);
  const FitRun exact = run("average", one, options);
  EXPECT_TRUE(exact.reached_tol);
  EXPECT_EQ(exact.last.rounds, 1);
  options.clients = 6;
  const Problem six(make_data({}, Loss::logistic), "generated", options);
  const FitRun several = run("average", six, options, 3);
  EXPECT_GT(several.last.distance, 1e-2);
  EXPECT_EQ(several.last.rounds, 1);
  EXPECT_EQ(several.last.bytes_sent, 6 * 12 * 8);
}

}  // namespace
}  // namespace tandem::fit
