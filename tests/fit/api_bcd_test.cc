// API-BCD: its fixed point against the penalized problem solved in the space of all clients'
// vectors, with and without rounds, and its tokens after a holder has failed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "fit/methods/api_bcd_async.h"
#include "fit/methods/token_walk.h"
#include "fit/problem/penalized.h"
#include "fit/problem/vectors.h"
#include "tandem/error.h"
#include "tandem/random.h"
#include "tests/fit/problems.h"

namespace tandem::fit {
namespace {

using test::make_data;
using test::run;

/// Solves a dense system by Gaussian elimination with pivoting.
Vector solve(std::vector<Vector> a, Vector b) {
  const size_t n = b.size();
  for (size_t c = 0; c < n; ++c) {
    size_t pivot = c;
    for (size_t r = c; r < n; ++r)
      if (std::abs(a[r][c]) > std::abs(a[pivot][c])) pivot = r;
    std::swap(a[c], a[pivot]);
    std::swap(b[c], b[pivot]);
    for (size_t r = c + 1; r < n; ++r) {
      const double factor = a[r][c] / a[c][c];
      for (size_t k = c; k < n; ++k) a[r][k] -= factor * a[c][k];
      b[r] -= factor * b[c];
    }
  }
  for (size_t c = n; c-- > 0;) {
    for (size_t k = c + 1; k < n; ++k) b[c] -= a[c][k] * b[k];
    b[c] /= a[c][c];
  }
  return b;
}

/// The z of: minimize over x_1, ..., x_n and z sum_i f_i(x_i) + tau / 2 |x_i - z|^2, by Newton's
/// method on all (n + 1) d variables at once.
Vector reference_optimum(const Problem& problem, double tau) {
  const size_t n = size_t(problem.clients()), d = problem.features(), size = (n + 1) * d;
  Vector all(size, 0.0);
  for (int step = 0; step < 30; ++step) {
    std::vector<Vector> hessian(size, Vector(size, 0.0));
    Vector gradient(size, 0.0), local(d), unit(d), product(d);
    for (size_t i = 0; i < n; ++i) {
      const Objective f = problem.client(int(i));
      const std::span<const double> x = std::span(all).subspan(i * d, d);
      f.gradient(x, local);
      const Vector curvature = f.curvature(x);
      for (size_t k = 0; k < d; ++k) {
        const size_t at = i * d + k, z = n * d + k;
        gradient[at] = local[k] + tau * (all[at] - all[z]);
        gradient[z] += tau * (all[z] - all[at]);
        unit.assign(d, 0.0);
        unit[k] = 1;
        f.hessian_product(curvature, unit, product);
        for (size_t j = 0; j < d; ++j) hessian[i * d + j][at] = product[j];
        hessian[at][at] += tau;
        hessian[z][z] += tau;
        hessian[at][z] = hessian[z][at] = -tau;
      }
    }
    add_scaled(all, -1, solve(hessian, gradient));
  }
  return {all.end() - int64_t(d), all.end()};
}

FitOptions options_for(Loss loss) {
  return {
      .loss = loss, .l2 = {.kappa = 10}, .clients = 6, .seed = 2, .tol = 1e-8, .max_rounds = 20000};
}

class ApiBcdTest : public testing::TestWithParam<Loss> {};

TEST_P(ApiBcdTest, PenalizedOptimumMatchesDenseNewton) {
  const FitOptions options = options_for(GetParam());
  const Problem problem(make_data({.features = 5, .entries = 3}, GetParam()), "generated", options);
  for (const double tau : {0.1, 1.0, 30.0}) {
    const Vector z = penalized_optimum(problem, tau);
    EXPECT_LE(relative_distance(z, reference_optimum(problem, tau)), 1e-10) << tau;
  }
}

TEST_P(ApiBcdTest, AnyNumberOfTokensReachesThePenalizedOptimum) {
  FitOptions options = options_for(GetParam());
  const Problem problem(make_data({}, GetParam()), "generated", options);
  for (const char* graph : {"ring", "random4"}) {
    for (const int tokens : {1, 2, 4}) {
      options.graph = graph;
      options.tokens = tokens;
      for (const uint64_t seed : {1, 2}) {
        options.seed = seed;
        for (const bool async : {false, true}) {
          options.async = async;
          EXPECT_TRUE(run("api-bcd", problem, options, 2).reached_tol)
              << graph << " " << tokens << " tokens" << (async ? ", async" : "");
        }
      }
    }
  }
}

// Tokens that share what they know take fewer rounds; that is no matter of the machine's speed.
TEST_P(ApiBcdTest, MoreTokensTakeFewerRounds) {
  FitOptions options = options_for(GetParam());
  options.clients = 12;
  options.graph = "random4";
  const Problem problem(make_data({}, GetParam()), "generated", options);
  for (const uint64_t seed : {1, 2}) {
    options.seed = seed;
    options.tokens = 1;
    const double one = double(run("api-bcd", problem, options).last.rounds);
    options.tokens = 2;
    EXPECT_LT(double(run("api-bcd", problem, options).last.rounds), 0.8 * one);
    options.tokens = 4;
    EXPECT_LT(double(run("api-bcd", problem, options).last.rounds), 0.6 * one);
  }
}

TEST_P(ApiBcdTest, AsyncOnOneRankHasTheBitsOfRounds) {
  FitOptions options = options_for(GetParam());
  options.graph = "random4";
  options.tol = 0;
  options.failures = {{0, 1, 5}, {2, 9, 20}, {3, 15, 60}};
  const Problem problem(make_data({}, GetParam()), "generated", options);
  for (const int tokens : {1, 2, 6}) {
    options.tokens = tokens;
    for (const int rounds : {1, 30, 200}) {
      options.max_rounds = rounds;
      options.async = false;
      const FitPoint expected = run("api-bcd", problem, options, 3).last;
      options.async = true;
      const FitPoint point = run("api-bcd", problem, options).last;
      EXPECT_EQ(point.distance, expected.distance) << tokens << " " << rounds;
      EXPECT_EQ(point.objective, expected.objective) << tokens << " " << rounds;
      EXPECT_EQ(point.bytes_sent, expected.bytes_sent) << tokens << " " << rounds;
      EXPECT_EQ(point.floats.up, expected.floats.up) << tokens << " " << rounds;
      EXPECT_EQ(point.floats.down, expected.floats.down) << tokens << " " << rounds;
    }
  }
}

// The last token to come within the tolerance may not be the last of its round.
TEST_P(ApiBcdTest, AsyncOnOneRankEndsWithTheRound) {
  FitOptions options = options_for(GetParam());
  options.graph = "random4";
  options.failures = {{2, 9, 20}};
  const Problem problem(make_data({}, GetParam()), "generated", options);
  for (const int tokens : {2, 3, 6}) {
    options.tokens = tokens;
    for (const double tol : {0.3, 1e-1, 1e-2, 1e-3, 1e-4}) {
      options.tol = tol;
      options.async = false;
      const FitRun expected = run("api-bcd", problem, options);
      options.async = true;
      const FitRun async = run("api-bcd", problem, options);
      EXPECT_TRUE(expected.reached_tol && async.reached_tol) << tokens << " " << tol;
      EXPECT_EQ(async.last.rounds, expected.last.rounds) << tokens << " " << tol;
      EXPECT_EQ(async.last.distance, expected.last.distance) << tokens << " " << tol;
      EXPECT_EQ(async.last.objective, expected.last.objective) << tokens << " " << tol;
      EXPECT_EQ(async.last.bytes_sent, expected.last.bytes_sent) << tokens << " " << tol;
      EXPECT_EQ(async.last.floats.up, expected.last.floats.up) << tokens << " " << tol;
    }
  }
}

TEST_P(ApiBcdTest, AsyncHistoryFollowsTheTokens) {
  FitOptions options = options_for(GetParam());
  options.tokens = 3;
  const Problem problem(make_data({}, GetParam()), "generated", options);
  options.async = true;
  const FitRun async = run("api-bcd", problem, options, 3);
  ASSERT_TRUE(async.reached_tol);
  EXPECT_EQ(async.history.front().rounds, 0);
  EXPECT_EQ(async.history.front().distance, 1);
  EXPECT_EQ(async.history.back().distance, async.last.distance);
  EXPECT_GT(async.history.size(), 100u);
  for (size_t i = 1; i < async.history.size(); ++i) {
    const FitPoint &before = async.history[i - 1], &point = async.history[i];
    EXPECT_GE(point.seconds, before.seconds);
    EXPECT_GE(point.rounds, before.rounds);
    EXPECT_GE(point.bytes_sent, before.bytes_sent);
  }
  const double wanted = problem.optimal_value();
  EXPECT_NEAR(async.last.objective, wanted, wanted);  // the target is biased
  EXPECT_GT(async.last.objective, wanted);
}

TEST_P(ApiBcdTest, BiasFallsWithTau) {
  FitOptions options = options_for(GetParam());
  options.max_rounds = 1;
  const Problem problem(make_data({}, GetParam()), "generated", options);
  double last = 1;
  for (const double tau : {0.5, 2.0, 8.0, 32.0}) {
    options.tau = tau;
    const double bias = run("api-bcd", problem, options).bias;
    EXPECT_LT(bias, last / 2) << tau;
    EXPECT_GT(bias, 1e-8) << tau;
    last = bias;
  }
}

TEST_P(ApiBcdTest, TokensOutliveTheirHolders) {
  FitOptions options = options_for(GetParam());
  options.graph = "random4";
  options.tokens = 2;
  const Problem problem(make_data({}, GetParam()), "generated", options);
  // Whoever holds a token in these rounds fails with it, at least once.
  for (int client = 0; client < 6; ++client)
    options.failures.push_back({client, 10 + 7 * client, 13 + 7 * client});
  EXPECT_TRUE(run("api-bcd", problem, options, 2).reached_tol);
  options.async = true;
  for (const int ranks : {1, 3}) EXPECT_TRUE(run("api-bcd", problem, options, ranks).reached_tol);
  options.async = false;
  options.failures = {{1, 20, 1 << 30}};  // never back: the run goes on without its rows
  options.max_rounds = 300;
  options.tokens = 1;
  const FitRun lost = run("api-bcd", problem, options, 2);
  EXPECT_EQ(lost.last.rounds, 300);
  EXPECT_GE(lost.last.floats.up, 300 * 12);  // the token moves in every round
  EXPECT_LT(lost.last.distance, 1);
}

TEST_P(ApiBcdTest, TokenWhoseFirstHolderHasFailedBeginsElsewhere) {
  FitOptions options = options_for(GetParam());
  const Problem problem(make_data({}, GetParam()), "generated", options);
  for (const int tokens : {1, 3}) {
    options.tokens = tokens;
    options.failures = {{0, 1, 40}, {1, 1, 20}, {4, 1, 3}};
    options.max_rounds = 20000;
    EXPECT_TRUE(run("api-bcd", problem, options, 2).reached_tol) << tokens;
    options.failures = {{0, 1, 1 << 30}};
    options.max_rounds = 300;
    const FitRun lost = run("api-bcd", problem, options, 2);
    EXPECT_GE(lost.last.floats.up, 300 * 12) << tokens;  // a token moves in every round
    EXPECT_LT(lost.last.distance, 1) << tokens;
  }
}

INSTANTIATE_TEST_SUITE_P(, ApiBcdTest, testing::Values(Loss::logistic, Loss::squared));

// Every client fails in some rounds, and for some time all but one.
TEST(TokenWalkTest, VisitsClientsThatTakePart) {
  FitOptions options = options_for(Loss::logistic);
  options.max_rounds = 400;
  options.tokens = 2;
  for (int client = 0; client < 6; ++client) {
    options.failures.push_back({client, 20 * client + 3, 20 * client + 30});
    if (client > 0) options.failures.push_back({client, 300, 320});
  }
  for (const char* name : {"ring", "random4"}) {
    const Graph graph = make_graph(name, 6, 1);
    int failed = 0;
    for (int token = 0; token < 2; ++token) {
      const TokenWalk walk(graph, options, token);
      auto visit = walk.first();
      ASSERT_TRUE(visit);
      EXPECT_EQ(visit->client, 3 * token);
      while (const auto next = walk.next(*visit)) {
        const auto& near = graph.neighbours[size_t(visit->client)];
        EXPECT_GT(next->round, visit->round);
        EXPECT_TRUE(options.is_alive(next->client, next->round));
        EXPECT_TRUE(std::ranges::count(near, next->client) ||
                    (next->client == visit->client && next->failed != TokenWalk::kNone));
        if (next->failed != TokenWalk::kNone) {
          EXPECT_TRUE(std::ranges::count(near, next->failed));
          EXPECT_FALSE(options.is_alive(next->failed, next->round));
          ++failed;
        } else {
          EXPECT_NE(next->client, visit->client);
        }
        visit = next;
      }
      EXPECT_EQ(visit->round, 400);
    }
    EXPECT_GT(failed, 4) << name;
  }
}

// Clients fail for half of the time, often all at once, and in the end for ever.
TEST(TokenWalkTest, WaitsOnlyAsLongAsItsClientsHaveFailed) {
  for (const uint64_t seed : {1, 2, 3}) {
    FitOptions options = options_for(Loss::logistic);
    options.max_rounds = int64_t(1) << 40;  // too many to look at each
    options.tokens = 2;
    const Graph graph = make_graph("ring", 6, 1);
    for (int client = 0; client < 6; ++client) {
      for (uint64_t i = 0; i < 12; ++i) {
        const auto draws = philox(seed, uint64_t(client), i);
        const int64_t first = 1 + int64_t(draws[0] % 400);
        options.failures.push_back({client, first, first + int64_t(draws[1] % 40)});
      }
      options.failures.push_back({client, 1, 9});
      options.failures.push_back({client, 500, std::numeric_limits<int64_t>::max()});
    }
    int64_t waited = 0;
    for (int token = 0; token < 2; ++token) {
      const TokenWalk walk(graph, options, token);
      auto visit = walk.first();
      ASSERT_TRUE(visit);
      EXPECT_GE(visit->round, 10);
      for (int64_t round = 10; round < visit->round; ++round)
        for (int client = 0; client < 6; ++client) EXPECT_FALSE(options.is_alive(client, round));
      while (const auto next = walk.next(*visit)) {
        const int to = next->failed == TokenWalk::kNone ? next->client : next->failed;
        EXPECT_TRUE(options.is_alive(next->client, next->round));
        for (int64_t round = visit->round + 1; round < next->round; ++round, ++waited) {
          EXPECT_FALSE(options.is_alive(to, round));
          EXPECT_FALSE(options.is_alive(visit->client, round));
        }
        visit = next;
      }
      EXPECT_LT(visit->round, 500);
    }
    EXPECT_GT(waited, 20) << seed;
  }
}

TEST_P(ApiBcdTest, RunEndsIfNoClientComesBack) {
  FitOptions options = options_for(GetParam());
  options.max_rounds = int64_t(1) << 40;
  for (int client = 0; client < 6; ++client)
    options.failures.push_back({client, 5, std::numeric_limits<int64_t>::max()});
  const Problem problem(make_data({}, GetParam()), "generated", options);
  for (const bool async : {false, true}) {
    options.async = async;
    const FitRun run = test::run("api-bcd", problem, options, 2);
    EXPECT_FALSE(run.reached_tol) << async;
    EXPECT_EQ(run.last.rounds, 4) << async;
  }
}

// 8 * ranks * tokens^2 * (4000 + 1) bytes: 91 tokens on 4 ranks take just below 1 GiB.
TEST(ApiBcdOptionsTest, MessagesOfAsyncTokensTakeAtMostAGiB) {
  FitOptions options = options_for(Loss::squared);
  options.l2 = {1};
  options.clients = 96;
  const Problem problem(make_data({.features = 4000}, Loss::squared), "generated", options);
  run_threads({.ranks = 4}, [&](Communicator& comm) {
    Channel channel(comm, options.clients);
    const fit::Setup setup{problem, options, channel};
    EXPECT_NO_THROW(check_async_walk(setup, {.tokens = 91}));
    EXPECT_THROW(check_async_walk(setup, {.tokens = 92}), InvalidArgument);
  });
  options.async = true;
  options.tokens = 92;
  try {
    run("api-bcd", problem, options, 4);
    FAIL() << "no error";
  } catch (const InvalidArgument& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr("--tokens 92: with --async, 4000 features"));
  }
}

TEST(ApiBcdOptionsTest, AsyncIsRefusedByMethodsWithRounds) {
  FitOptions options = options_for(Loss::logistic);
  options.async = true;
  EXPECT_THROW(test::check("scaffnew", options), InvalidArgument);
  EXPECT_NO_THROW(test::check("api-bcd", options));
}

TEST(ApiBcdOptionsTest, ValuesOutOfRangeAreRefused) {
  FitOptions options = options_for(Loss::logistic);
  for (const int tokens : {0, 7}) {
    options.tokens = tokens;
    EXPECT_THROW(test::check("api-bcd", options), InvalidArgument) << tokens;
  }
  options.tokens = 1;
  EXPECT_NO_THROW(test::check("api-bcd", options));
  for (const double tau : {0.0, -1.0, std::nan("")}) {
    options.tau = tau;
    EXPECT_THROW(test::check("api-bcd", options), InvalidArgument) << tau;
  }
}

}  // namespace
}  // namespace tandem::fit
