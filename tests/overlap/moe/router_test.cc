#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "kernels/router.h"
#include "tandem/random.h"
#include "tests/comm/ranks.h"

namespace tandem {
namespace {

constexpr int64_t kRows = 9, kExperts = 7;

struct Routed {
  std::vector<float> scores = std::vector<float>(size_t(kRows * kExperts));
  std::vector<int32_t> experts;
  std::vector<float> weights;
};

Routed route(std::vector<float> logits, std::span<const float> bias, const RouterOptions& o) {
  Routed r;
  r.experts.resize(size_t(kRows * o.top_k));
  r.weights.resize(r.experts.size());
  const Tensor biases = bias.empty() ? Tensor() : Tensor::of(bias, {kExperts});
  route_forward(Exec{}, Tensor::of(std::span(logits), {kRows, kExperts}), biases, o,
                Tensor::of(std::span(r.scores), {kRows, kExperts}),
                Tensor::of(std::span(r.experts), {kRows, o.top_k}),
                Tensor::of(std::span(r.weights), {kRows, o.top_k}));
  return r;
}

/// Logits with no two in a row so close that a small step changes the choice.
std::vector<float> spread_logits() {
  std::vector<float> logits;
  for (int64_t row = 0; row < kRows; ++row) {
    for (int64_t e = 0; e < kExperts; ++e) {
      logits.push_back(0.4f * float((3 * e + row) % kExperts) - 1 + 0.02f * float(row));
    }
  }
  return logits;
}

/// Function of which the gradients below are taken.
double objective(const std::vector<float>& logits, const RouterOptions& o,
                 const std::vector<float>& dweights, const std::vector<float>& balance) {
  const Routed r = route(logits, {}, o);
  double sum = 0;
  for (size_t i = 0; i < r.weights.size(); ++i) sum += double(r.weights[i]) * double(dweights[i]);
  for (size_t row = 0; row < size_t(kRows); ++row) {
    double all = 0, weighted = 0;
    for (size_t e = 0; e < size_t(kExperts); ++e) {
      all += double(r.scores[row * kExperts + e]);
      weighted += double(r.scores[row * kExperts + e]) * double(balance[e]);
    }
    sum += weighted / all;
  }
  return sum;
}

TEST(Router, GradientsAgreeWithCentralDifferences) {
  if (test::mpi_world()) GTEST_SKIP() << "one process";
  for (const bool sigmoid : {false, true}) {
    for (const bool normalize : {false, true}) {
      const RouterOptions o{3, sigmoid, normalize, 1.5f};
      std::vector<float> logits = spread_logits(), balance, dweights, dlogits(logits.size());
      for (uint64_t e = 0; e < uint64_t(kExperts); ++e) balance.push_back(normal(4, 1, e));
      for (uint64_t i = 0; i < uint64_t(kRows * 3); ++i) dweights.push_back(normal(4, 2, i));
      Routed r = route(logits, {}, o);
      route_backward(Exec{}, Tensor::of(std::span(r.scores), {kRows, kExperts}),
                     Tensor::of(std::span(r.experts), {kRows, 3}),
                     Tensor::of(std::span(dweights), {kRows, 3}),
                     Tensor::of(std::span(balance), {kExperts}), o,
                     Tensor::of(std::span(dlogits), {kRows, kExperts}));
      for (size_t i = 0; i < logits.size(); ++i) {
        const float original = logits[i], step = 1e-3f;
        logits[i] = original + step;
        const double above = objective(logits, o, dweights, balance);
        logits[i] = original - step;
        const double below = objective(logits, o, dweights, balance);
        logits[i] = original;
        EXPECT_NEAR(double(dlogits[i]), (above - below) / 2e-3, 2e-3) << i << " " << sigmoid;
      }
    }
  }
}

TEST(Router, ChoosesTheLargestAndTheLowerIndexOfEquals) {
  if (test::mpi_world()) GTEST_SKIP() << "one process";
  std::vector<float> logits(size_t(kRows * kExperts), 0.0f);
  logits[3] = 2;
  const Routed r = route(logits, {}, {2});
  EXPECT_EQ(r.experts[0], 3);
  EXPECT_EQ(r.experts[1], 0);
  EXPECT_EQ(r.experts[2], 0);
  EXPECT_EQ(r.experts[3], 1);
  EXPECT_NEAR(r.weights[0] + r.weights[1], 1, 1e-6);
}

TEST(Router, BiasAffectsChoicesButNotWeights) {
  if (test::mpi_world()) GTEST_SKIP() << "one process";
  const std::vector<float> logits(size_t(kRows * kExperts), 0.0f);
  std::vector<float> bias(size_t(kExperts), 0.0f);
  bias[5] = 1;
  const Routed r = route(logits, bias, {2, true, false, 1});
  EXPECT_EQ(r.experts[0], 5);
  EXPECT_EQ(r.experts[1], 0);
  EXPECT_FLOAT_EQ(r.weights[0], 0.5f);
}

/// Routing, load and gradients of some rows.
struct RoutedRows {
  std::vector<float> scores, weights, dlogits;
  std::vector<int32_t> experts;
  std::vector<double> load;
};

/// `tokens`: empty: none is padding.
RoutedRows route_rows(std::vector<float> logits, std::vector<float> dweights,
                      std::vector<float> bias, const std::vector<int32_t>& tokens,
                      const RouterOptions& o) {
  const auto experts = int64_t(bias.size()), rows = int64_t(logits.size()) / experts;
  RoutedRows r;
  r.scores.assign(logits.size(), NAN);
  r.weights.assign(dweights.size(), NAN);
  r.dlogits.assign(logits.size(), NAN);
  r.experts.assign(dweights.size(), 99);
  r.load.assign(size_t(2 * experts), 0);
  const auto matrix = [&](auto& values, int64_t columns) {
    return Tensor::of(std::span(values), {rows, columns});
  };
  const Tensor biases = Tensor::of(std::span(bias), {experts}),
               load(r.load.data(), DType::u8, {1, router_load_bytes(experts)});
  route_forward(Exec{}, matrix(logits, experts), biases, o, matrix(r.scores, experts),
                matrix(r.experts, o.top_k), matrix(r.weights, o.top_k),
                tokens.empty() ? Tensor() : Tensor::of(std::span(tokens), {rows}));
  add_router_load(Exec{}, matrix(r.scores, experts), matrix(r.experts, o.top_k), load);
  const std::vector<float> balance = bias;
  route_backward(Exec{}, matrix(r.scores, experts), matrix(r.experts, o.top_k),
                 matrix(dweights, o.top_k), Tensor::of(std::span(balance), {experts}), o,
                 matrix(r.dlogits, experts));
  return r;
}

TEST(Router, PaddingIsAsIfLeftOut) {
  if (test::mpi_world()) GTEST_SKIP() << "one process";
  uint64_t number = 0;
  for (const int experts : {1, 4, 9}) {
    for (const int top_k : {1, 3, experts}) {
      for (int form = 0; form < 4; ++form) {
        if (top_k > experts) continue;
        const RouterOptions o{top_k, form % 2 == 1, form < 2, 1.5f};
        const double share = 0.1 * double(++number % 11);
        const size_t rows = 40, n = size_t(experts), k = size_t(top_k);
        std::vector<float> bias, logits[2], dweights[2];  // of all rows; without padding
        std::vector<int32_t> tokens;
        for (size_t e = 0; e < n; ++e) bias.push_back(normal(number, 1, e));
        for (size_t row = 0; row < rows; ++row) {
          tokens.push_back(double(uniform(number, 2, row)) < share ? -1 : int32_t(row));
          for (const bool is_left_out : {false, true}) {
            if (is_left_out && tokens[row] < 0) continue;
            for (size_t e = 0; e < n; ++e) {
              logits[is_left_out].push_back(normal(number, 3, row * n + e));
            }
            for (size_t i = 0; i < k; ++i) {
              dweights[is_left_out].push_back(normal(number, 4, row * k + i));
            }
          }
          if (tokens[row] < 0) logits[0].back() = NAN;
        }
        const RoutedRows padded = route_rows(logits[0], dweights[0], bias, tokens, o),
                         expected = route_rows(logits[1], dweights[1], bias, {}, o);
        EXPECT_EQ(padded.load, expected.load);
        const auto compare = [&](const auto& found, const auto& real, size_t width, auto none) {
          size_t next = 0;
          for (size_t i = 0; i < found.size(); ++i) {
            const bool is_real = tokens[i / width] >= 0;
            ASSERT_EQ(found[i], is_real ? real[next] : none) << number << " row " << i / width;
            next += is_real;
          }
        };
        compare(padded.scores, expected.scores, n, 0.f);
        compare(padded.experts, expected.experts, k, -1);
        compare(padded.weights, expected.weights, k, 0.f);
        compare(padded.dlogits, expected.dlogits, n, 0.f);
      }
    }
  }
}

TEST(Router, RowWithANonFiniteLogitGetsNaN) {
  if (test::mpi_world()) GTEST_SKIP() << "one process";
  std::vector<float> logits = spread_logits();
  logits[size_t(kExperts) + 2] = NAN;
  const Routed r = route(logits, {}, {2});
  EXPECT_TRUE(std::isfinite(r.weights[0]) && std::isfinite(r.weights[4]));
  EXPECT_TRUE(std::isnan(r.weights[2]) && std::isnan(r.weights[3]));
  EXPECT_NE(r.experts[2], r.experts[3]);
}

}  // namespace
}  // namespace tandem
