// Gossip against a dense reference, its rounds and bits with few bits per value, graphs, and the
// control without shifts.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "fit/exchange/graph.h"
#include "fit/problem/vectors.h"
#include "tandem/error.h"
#include "tests/fit/problems.h"

namespace tandem::fit {
namespace {

using test::make_data;
using test::run;
using testing::HasSubstr;

FitOptions options_for(int clients, const char* graph, const char* codec) {
  return {.l2 = {.kappa = 30},
          .clients = clients,
          .seed = 5,
          .tol = 1e-10,
          .max_rounds = 3000,
          .graph = graph,
          .codec = Wire::parse(codec)};
}

class GraphTest : public testing::Test {
 protected:
  Graph read(const std::string& text, int clients) {
    std::ofstream(path_) << text;
    return make_graph(path_, clients, 0);
  }
  std::string refusal(const std::string& text, int clients) {
    try {
      read(text, clients);
    } catch (const InvalidArgument& error) {
      return error.what();
    }
    return "no error";
  }
  void TearDown() override { std::filesystem::remove(path_); }

  const std::string path_ = testing::TempDir() + "tandem_fit_edges.txt";
};

TEST_F(GraphTest, NamedGraphsHaveTheirDegrees) {
  const Graph ring = make_graph("ring", 7, 0), torus = make_graph("torus", 12, 0);
  for (const auto& list : ring.neighbours) EXPECT_EQ(list.size(), 2u);
  for (const auto& list : torus.neighbours) EXPECT_EQ(list.size(), 4u);
  for (const int clients : {5, 6, 9, 16, 64}) {
    for (const uint64_t seed : {0, 1, 2}) {
      const Graph graph = make_graph("random4", clients, seed);
      for (const auto& list : graph.neighbours) EXPECT_EQ(list.size(), 4u);
    }
  }
  EXPECT_NE(make_graph("random4", 16, 0).neighbours, make_graph("random4", 16, 1).neighbours);
  EXPECT_EQ(make_graph("ring", 2, 0).neighbours[0], std::vector<int>{1});
}

TEST_F(GraphTest, FilesOfEdgesAreRead) {
  const Graph graph = read("0 1 # first\n\n2 1\n1 2\n# none\n3 0\n", 4);
  EXPECT_EQ(graph.neighbours, (std::vector<std::vector<int>>{{1, 3}, {0, 2}, {1}, {0}}));
  EXPECT_DOUBLE_EQ(graph.weight(0, 1), 1.0 / 3);
  EXPECT_EQ(graph.max_degree(), 2);
}

TEST_F(GraphTest, WrongGraphsAreRefused) {
  EXPECT_THAT(refusal("0 1\n2 3\n", 4), HasSubstr("no path from client 0 to client 2"));
  EXPECT_THAT(refusal("0 1\n", 3), HasSubstr("no path from client 0 to client 2"));
  EXPECT_THAT(refusal("", 2), HasSubstr("no path from client 0 to client 1"));
  EXPECT_THAT(refusal("0 1\n1 4\n", 4), HasSubstr(":2: \"1 4\": expected two different clients"));
  EXPECT_THAT(refusal("1 1\n", 4), HasSubstr(":1: \"1 1\": expected two different clients"));
  EXPECT_THAT(refusal("0\n", 4), HasSubstr("expected two different clients of 0 to 3"));
  EXPECT_THAT(refusal("0 1 2\n", 4), HasSubstr("expected two different clients"));
  EXPECT_THAT(refusal("0 x\n", 4), HasSubstr("expected two different clients"));
  EXPECT_THROW(make_graph("torus", 7, 0), InvalidArgument);
  EXPECT_THROW(make_graph("torus", 8, 0), InvalidArgument);
  EXPECT_THROW(make_graph("random4", 4, 0), InvalidArgument);
  EXPECT_THROW(make_graph("no such graph", 4, 0), IoError);
}

/// The uncompressed iteration with matrices of all clients' vectors.
std::vector<Vector> reference_rounds(const Problem& problem, const Graph& graph, int rounds) {
  const size_t n = size_t(problem.clients()), d = problem.features();
  const double step = 2 / (problem.max_smoothness() + problem.l2()), theta = 0.5 / step;
  std::vector<Vector> x(n, Vector(d, 0.0)), z = x, y = x, gradients = x;
  for (int round = 0; round < rounds; ++round) {
    for (size_t i = 0; i < n; ++i) {
      problem.client(int(i)).gradient(x[i], gradients[i]);
      for (size_t k = 0; k < d; ++k) y[i][k] = x[i][k] - step * (gradients[i][k] + z[i][k]);
    }
    for (size_t i = 0; i < n; ++i) {
      for (const int j : graph.neighbours[i]) {
        for (size_t k = 0; k < d; ++k)
          z[i][k] += theta * graph.weight(int(i), j) * (y[i][k] - y[size_t(j)][k]);
      }
      for (size_t k = 0; k < d; ++k) x[i][k] -= step * (gradients[i][k] + z[i][k]);
    }
  }
  return x;
}

TEST(GossipTest, MatchesDenseReferenceWithoutCodec) {
  for (const char* graph : {"ring", "torus", "random4"}) {
    FitOptions options = options_for(9, graph, "none");
    options.tol = 0;
    options.max_rounds = 8;
    const Problem problem(make_data({}, Loss::logistic), "generated", options);
    double distance = 0;
    for (const Vector& x : reference_rounds(problem, make_graph(graph, 9, options.seed), 8))
      distance = std::max(distance, relative_distance(x, problem.optimum()));
    EXPECT_NEAR(run("gossip", problem, options, 2).last.distance, distance, 1e-12) << graph;
  }
}

TEST(GossipTest, FewBitsTakeTheRoundsOfUncompressedValues) {
  for (const char* graph : {"ring", "torus", "random4"}) {
    FitOptions options = options_for(16, graph, "none");
    const Problem problem(make_data({.rows = 320, .features = 256, .entries = 20}, Loss::logistic),
                          "generated", options);
    const FitRun full = run("gossip", problem, options);
    ASSERT_TRUE(full.reached_tol) << graph;
    for (const char* codec : {"int4", "int3"}) {
      options.codec = Wire::parse(codec);
      const FitRun few = run("gossip", problem, options, 2);
      EXPECT_TRUE(few.reached_tol) << graph << " " << codec;
      EXPECT_LE(double(few.last.rounds), 1.1 * double(full.last.rounds)) << graph << " " << codec;
      EXPECT_LE(8 * few.last.bytes_sent, full.last.bytes_sent) << graph << " " << codec;
    }
    options.codec = Wire::parse("int2");
    EXPECT_TRUE(run("gossip", problem, options).reached_tol) << graph;
    options.codec = Wire::parse("int4");
    options.control = true;
    options.max_rounds = 4 * full.last.rounds;
    EXPECT_GT(run("gossip", problem, options).last.distance, 1e-3) << graph;
  }
}

TEST(GossipTest, SendsToNeighboursOnly) {
  constexpr int64_t kRounds = 5, kFeatures = 40;
  FitOptions options = options_for(12, "ring", "none");
  options.tol = 0;
  options.max_rounds = kRounds;
  const Problem problem(make_data({.features = kFeatures}, Loss::logistic), "generated", options);
  const FitPoint ring = run("gossip", problem, options, 3).last;
  EXPECT_EQ(ring.floats.up, kRounds * 2 * kFeatures);
  EXPECT_EQ(ring.floats.down, kRounds * 2 * kFeatures);
  EXPECT_EQ(ring.bytes_sent, kRounds * 12 * 2 * kFeatures * 8);
  options.graph = "torus";
  options.codec = Wire::parse("int4:g32");
  const FitPoint torus = run("gossip", problem, options, 2).last;
  EXPECT_EQ(torus.bytes_sent,
            kRounds * 12 * 4 * int64_t(options.codec->bytes(kFeatures, DType::f32)));
}

TEST(GossipTest, RefusesCodecsWithoutStochasticRounding) {
  for (const char* codec : {"mxfp8", "e4m3", "lossless", "int2:spikes"}) {
    EXPECT_NO_THROW(test::check("gossip", options_for(4, "ring", "int4")));
    EXPECT_THROW(test::check("gossip", options_for(4, "ring", codec)), InvalidArgument) << codec;
  }
}

}  // namespace
}  // namespace tandem::fit
