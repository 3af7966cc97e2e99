// Derivatives against differences of dense sums, and exact answers against their optimality
// conditions.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "fit/problem/minimize.h"
#include "fit/problem/vectors.h"
#include "tandem/error.h"
#include "tests/fit/problems.h"

namespace tandem::fit {
namespace {

using test::make_contrasts;
using test::make_data;

double dense_value(const Dataset& data, Loss loss, Shard rows, double weight, double l2,
                   const Vector& x) {
  double sum = 0;
  for (int64_t r = rows.begin; r < rows.begin + rows.count; ++r) {
    Vector dense(x.size(), 0.0);
    for (int64_t k = data.offsets[size_t(r)]; k < data.offsets[size_t(r) + 1]; ++k)
      dense[size_t(data.columns[size_t(k)])] = data.values[size_t(k)];
    const double z = dot(dense, x), y = data.labels[size_t(r)];
    sum += loss == Loss::logistic ? std::log(1 + std::exp(-y * z)) : (z - y) * (z - y) / 2;
  }
  return weight * sum + l2 / 2 * dot(x, x);
}

Vector some_point(size_t size, double scale) {
  Vector x(size);
  for (size_t i = 0; i < size; ++i) x[i] = scale * std::sin(double(i) + 1);
  return x;
}

class LossTest : public testing::TestWithParam<Loss> {};

TEST_P(LossTest, DerivativesMatchDenseDifferences) {
  const Dataset data = make_data({.rows = 20, .features = 7, .entries = 4}, GetParam());
  const Shard rows{5, 11};
  const double weight = 0.3, l2 = 0.2, h = 1e-6;
  const Objective f(data, rows, weight, GetParam(), l2);
  const Vector x = some_point(7, 1.5), v = some_point(7, 0.7);
  const auto value = [&](const Vector& at) {
    return dense_value(data, GetParam(), rows, weight, l2, at);
  };
  EXPECT_NEAR(f.value(x), value(x), 1e-12);
  Vector gradient(7), product(7), gradient_after(7), x_after = x;
  f.gradient(x, gradient);
  for (size_t i = 0; i < x.size(); ++i) {
    Vector up = x, down = x;
    up[i] += h;
    down[i] -= h;
    EXPECT_NEAR(gradient[i], (value(up) - value(down)) / (2 * h), 1e-7);
  }
  f.hessian_product(f.curvature(x), v, product);
  add_scaled(x_after, h, v);
  f.gradient(x_after, gradient_after);
  for (size_t i = 0; i < x.size(); ++i)
    EXPECT_NEAR(product[i], (gradient_after[i] - gradient[i]) / h, 1e-5);
}

TEST_P(LossTest, SmoothnessBoundsEveryDirection) {
  const Dataset data = make_data({}, GetParam());
  const Objective f(data, {0, data.rows()}, 1.0 / double(data.rows()), GetParam(), 0);
  const double bound = f.smoothness();
  const Vector zero(12, 0.0), curvature = f.curvature(zero);
  double largest = 0;
  for (int i = 0; i < 200; ++i) {
    Vector v = some_point(12, 1 + i), product(12);
    for (size_t k = 0; k < v.size(); ++k) v[k] = std::cos(double(k * size_t(i)) + v[k]);
    f.hessian_product(curvature, v, product);
    largest = std::max(largest, dot(v, product) / dot(v, v));
  }
  EXPECT_LE(largest, bound * (1 + 1e-6));
  EXPECT_GE(largest, 0.3 * bound);
}

TEST_P(LossTest, SmoothnessOfContrastsIsThatOfTheirPairs) {
  for (const int64_t pairs : {1, 3, 8}) {
    const Dataset data = make_contrasts(48, pairs, GetParam());
    const double weight = 0.5, curvature = GetParam() == Loss::logistic ? 0.25 : 1;
    for (const Shard rows : {Shard{0, 48}, Shard{5, 20}}) {
      Vector squares(size_t(pairs), 0.0);  // (v, -v) has the eigenvalue 2 v^2
      for (int64_t r = rows.begin; r < rows.begin + rows.count; ++r)
        squares[size_t(r % pairs)] += 2 * std::pow(data.values[size_t(2 * r)], 2);
      const double expected =
          weight * curvature * *std::max_element(squares.begin(), squares.end());
      const Objective f(data, rows, weight, GetParam(), 0);
      EXPECT_NEAR(f.smoothness(), expected, 1e-5 * expected) << pairs;
    }
  }
}

TEST_P(LossTest, SmoothnessIsZeroOnlyWithoutValues) {
  Dataset data = make_data({}, GetParam());
  for (const double value : {1e-9, 0.0}) {
    std::fill(data.values.begin(), data.values.end(), value);
    const Objective f(data, {0, data.rows()}, 1, GetParam(), 0);
    EXPECT_EQ(f.smoothness() > 0, value > 0) << value;
  }
}

TEST_P(LossTest, ExtremeMarginsStayFinite) {
  const Dataset data = make_data({}, GetParam());
  const Objective f(data, {0, data.rows()}, 1, GetParam(), 0);
  Vector x = some_point(12, 1e5), gradient(12);
  f.gradient(x, gradient);
  EXPECT_TRUE(std::isfinite(f.value(x)));
  for (const double g : gradient) EXPECT_TRUE(std::isfinite(g));
}

/// max |gradient of the smooth part + subgradient of l1 |x|_1|
double violation(const Subproblem& problem, const Vector& x) {
  Vector gradient(x.size());
  problem.gradient(x, gradient);
  double worst = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double excess = x[i] == 0 ? std::max(0.0, std::abs(gradient[i]) - problem.l1)
                                    : std::abs(gradient[i] + (x[i] > 0 ? problem.l1 : -problem.l1));
    worst = std::max(worst, excess);
  }
  return worst;
}

TEST_P(LossTest, MinimaMeetTheirOptimalityConditions) {
  for (const uint64_t seed : {1, 2, 3}) {
    const Dataset data = make_data({.rows = 60, .features = 30, .seed = seed}, GetParam());
    for (const double l1 : {0.0, 0.01, 0.1}) {
      for (const double l2 : {1e-4, 0.1}) {
        const Objective f(data, {0, 60}, 1.0 / 60, GetParam(), l2);
        const Vector linear = some_point(30, 0.02), center = some_point(30, 0.5);
        const Subproblem problems[] = {
            {.f = f, .l1 = l1},
            {.f = f, .linear = linear, .attraction = 0.3, .center = center, .l1 = l1}};
        for (const Subproblem& problem : problems) {
          Vector x(30, 0.0);
          minimize(problem, x);
          EXPECT_LE(violation(problem, x), 1e-12) << "l1 " << l1 << " l2 " << l2;
          if (l1 == 0.1) {
            EXPECT_GT(std::count(x.begin(), x.end(), 0.0), 3);
          }
        }
      }
    }
  }
}

TEST_P(LossTest, ClientsObjectivesHaveTheWholeOneAsMean) {
  FitOptions options{.loss = GetParam(), .l2 = {.value = 0.1}, .clients = 7};
  const Problem problem(make_data({.rows = 50}, GetParam()), "generated", options);
  const Vector x = some_point(12, 1);
  Vector mean(12, 0.0), gradient(12);
  double value = 0;
  for (int c = 0; c < 7; ++c) {
    problem.client(c).gradient(x, gradient);
    add_scaled(mean, 1.0 / 7, gradient);
    value += problem.client(c).value(x) / 7;
  }
  problem.whole().gradient(x, gradient);
  EXPECT_NEAR(value, problem.value(x), 1e-12);
  for (size_t i = 0; i < 12; ++i) EXPECT_NEAR(mean[i], gradient[i], 1e-12);
}

TEST_P(LossTest, KappaIsAsAskedFor) {
  const FitOptions options{.loss = GetParam(), .l2 = {.kappa = 250}, .clients = 6};
  const Problem problem(make_data({}, GetParam()), "generated", options);
  EXPECT_NEAR(problem.kappa(), 250, 1e-9);
}

INSTANTIATE_TEST_SUITE_P(, LossTest, testing::Values(Loss::logistic, Loss::squared));

TEST(ProblemTest, RefusesWhatHasNoUniqueAnswer) {
  const FitOptions options{.clients = 4};
  EXPECT_THROW(Problem(make_data({}, Loss::logistic), "generated", options), InvalidArgument);
}

TEST(ProblemTest, RefusesMoreClientsThanRows) {
  const FitOptions options{.l2 = {.value = 1}, .clients = 97};
  EXPECT_THROW(Problem(make_data({}, Loss::logistic), "generated", options), InvalidArgument);
}

}  // namespace
}  // namespace tandem::fit
