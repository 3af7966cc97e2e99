#include "engine/data/blend/blend.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <span>

#include "engine/config/config_paths.h"
#include "engine/data/blend/blend_order.h"
#include "engine/data/sampler.h"
#include "engine/data/tokens/token_files.h"
#include "tandem/error.h"
#include "tandem/random.h"
#include "tests/engine/data/open_configured.h"
#include "token_fixtures.h"

namespace tandem {
namespace {

using Paths = std::vector<std::string>;

TEST(BlendOrder, CountsAreThoseOfTheSamplesBefore) {
  for (const std::vector<double>& weights : std::vector<std::vector<double>>{
           {1}, {0.7, 0.3}, {3, 1, 1, 5}, {1e-6, 1}, {0.5, 0.5}, {1, 1e-300, 2}}) {
    const BlendOrder order(weights);
    std::vector<int64_t> counts(weights.size());
    for (int64_t sample = 0; sample < 3000; ++sample) {
      for (size_t i = 0; i < weights.size(); ++i) ASSERT_EQ(order.count(i, sample), counts[i]);
      ++counts[order.source(sample)];
    }
  }
}

TEST(BlendOrder, CountsAreConsistentFarAway) {
  const std::vector<double> weights{0.2, 0.5, 0.3};
  const BlendOrder order(weights);
  for (uint64_t i = 0; i < 200; ++i) {
    const int64_t sample = int64_t(philox(1, 2, i)[0]) << 24;  // up to 2^56
    int64_t total = 0;
    for (size_t source = 0; source < 3; ++source) {
      const int64_t count = order.count(source, sample);
      EXPECT_EQ(order.count(source, sample + 1) - count, order.source(sample) == source);
      EXPECT_NEAR(double(count) / double(sample + 1), weights[source], 1e-6);
      total += count;
    }
    EXPECT_EQ(total, sample);
  }
}

TEST(BlendOrder, EveryStretchHasItsShareOfEachSource) {
  double worst = 0;
  for (uint64_t test = 0; test < 10; ++test) {
    std::vector<double> weights;
    for (uint64_t i = 0; i < 2 + test % 5; ++i) {
      weights.push_back(double(1 + philox(2, test, i)[0] % 1000));
    }
    const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
    const BlendOrder order(weights);
    std::vector<int64_t> counts(weights.size());
    for (int64_t sample = 0; sample < 100'000; ++sample) {
      ++counts[order.source(sample)];
      for (size_t i = 0; i < weights.size(); ++i) {
        const double share = double(sample + 1) * weights[i] / total;
        worst = std::max(worst, std::abs(double(counts[i]) - share));
      }
    }
  }
  EXPECT_LT(worst, 5);
  EXPECT_GT(worst, 0.5);
}

TEST(BlendPaths, AreRelativeToTheFile) {
  const TrainConfig config = parse_config(
      "[data]\npaths = [\"0.7 a\", \"1e-1  ../b c\", \".5 /abs\", \"x 0.7\"]\n"
      "val_paths = \"v\"\nmanifest = \"m\"\n",
      "/jobs/job.toml");
  EXPECT_EQ(config.data.paths, (Paths{"0.7 /jobs/a", "1e-1  /b c", ".5 /abs", "/jobs/x 0.7"}));
  EXPECT_EQ(config.data.val_paths, Paths{"/jobs/v"});
  EXPECT_EQ(config.data.manifest, "/jobs/m");
  EXPECT_EQ(parse_weighted_path("1e-1  /b c").weight, 0.1);
  EXPECT_EQ(parse_weighted_path("1e-1  /b c").path, "/b c");
  EXPECT_EQ(parse_weighted_path("./1 x").weight, 0);
  EXPECT_EQ(parse_weighted_path("./1 x").path, "./1 x");
}

TEST(BlendPaths, HaveWeightsAboveZeroOrNone) {
  const auto check = [](const Paths& paths) -> std::string {
    try {
      check_weights(paths, "data.paths");
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "accepted";
  };
  EXPECT_EQ(check({"a", "b"}), "accepted");
  EXPECT_EQ(check({"1 a", "2.5 b"}), "accepted");
  EXPECT_EQ(check({"nan a", "infinity b"}), "accepted");  // paths
  EXPECT_EQ(check({"1 a", "b"}),
            "data.paths: \"b\" has no weight: expected one as in the other entries");
  for (const char* entry : {"0 a", "-1 a", "1e999 a", "1 "}) {
    EXPECT_THAT(check({entry}), ::testing::HasSubstr("expected a weight above 0 and a path"))
        << entry;
  }
}

struct BlendOfTwo {
  TempDir dir;
  TrainConfig config;
  std::unique_ptr<TokenSource> source;
  BlendOfTwo() {
    write_bytes(dir / "a.bin", tokens_as(random_tokens(411, 100, 1), 2));
    write_bytes(dir / "b.bin", tokens_as(random_tokens(150, 100, 2), 2));
    config.data.paths = {"0.7 " + dir / "a.bin", "0.3 " + dir / "b.bin"};
    source = open_configured(config);
  }
};

TEST(Blend, EachEpochOfASourceHasItsWindowsOnce) {
  const BlendOfTwo blend;
  constexpr int64_t kSeq = 10, kOfA = 41, kOfB = 15;
  const Sampler sampler(*blend.source, kSeq, 3);
  EXPECT_EQ(sampler.windows(), kOfA + kOfB);
  std::vector<int64_t> seen(kOfA + kOfB);  // by window
  const std::span<int64_t> seen_a = std::span(seen).first(kOfA);
  const std::span<int64_t> seen_b = std::span(seen).last(kOfB);
  int64_t of_a = 0;
  constexpr int64_t kSamples = 5000;
  for (int64_t sample = 0; sample < kSamples; ++sample) {
    const int64_t window = sampler.window(sample);
    ++seen[size_t(window)];
    const bool is_a = window < kOfA;
    of_a += is_a;
    for (const auto windows : {seen_a, seen_b}) {
      const auto [min, max] = std::ranges::minmax(windows);
      ASSERT_LE(max - min, 1) << sample;
    }
    std::vector<int32_t> tokens(kSeq), targets(kSeq), expected(kSeq + 1);
    sampler.read(sample, tokens, targets);
    blend.source->components()[is_a ? 0 : 1].source->read((is_a ? window : window - kOfA) * kSeq,
                                                          expected);
    EXPECT_TRUE(std::equal(targets.begin(), targets.end(), expected.begin() + 1));
  }
  EXPECT_NEAR(double(of_a), 0.7 * kSamples, 5);
  EXPECT_EQ(sampler.ended_epochs(0), 0);
  EXPECT_EQ(sampler.ended_epochs(kSamples), of_a / kOfA + (kSamples - of_a) / kOfB);
}

TEST(Blend, FingerprintFollowsWeightsAndSources) {
  BlendOfTwo blend;
  const std::string before = blend.source->fingerprint();
  EXPECT_EQ(open_configured(blend.config)->fingerprint(), before);
  blend.config.data.paths[0].replace(0, 3, "0.6");
  EXPECT_NE(open_configured(blend.config)->fingerprint(), before);
}

TEST(Blend, HoldsOutWhatItsSourcesDo) {
  BlendOfTwo blend;
  blend.config.data.val_fraction = 0.1;
  const auto source = open_configured(blend.config);
  ASSERT_TRUE(source->held_out().stream);
  EXPECT_EQ(source->held_out().stream->tokens(), 41 + 15);
  std::vector<int32_t> tokens(56), a(411), b(150);
  source->held_out().stream->read(0, tokens);
  blend.source->components()[0].source->read(0, a);
  blend.source->components()[1].source->read(0, b);
  EXPECT_TRUE(std::equal(tokens.begin(), tokens.begin() + 41, a.end() - 41));
  EXPECT_TRUE(std::equal(tokens.begin() + 41, tokens.end(), b.end() - 15));
}

}  // namespace
}  // namespace tandem
