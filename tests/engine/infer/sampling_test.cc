#include "engine/infer/sampling/sampling.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "core/host_copy.h"
#include "engine/infer/sampling/stop_text.h"
#include "tandem/error.h"

namespace tandem {
namespace {

std::map<int32_t, double> frequencies(const std::vector<float>& logits,
                                      const SamplingOptions& options) {
  std::map<int32_t, double> counts;
  constexpr int kDraws = 20000;
  for (uint64_t i = 0; i < kDraws; ++i)
    counts[sample(host_tensor(logits), options, i)] += 1.0 / kDraws;
  return counts;
}

const std::vector<float> kLogits{std::log(0.1f), std::log(0.4f), std::log(0.2f), std::log(0.3f)};

int32_t draw(const SamplingOptions& options, uint64_t index) {
  return sample(host_tensor(kLogits), options, index);
}

TEST(Sampling, TemperatureZeroTakesTheLikeliest) {
  const auto only = frequencies(kLogits, {.temperature = 0});
  ASSERT_EQ(only.size(), 1u);
  EXPECT_EQ(only.begin()->first, 1);
}

TEST(Sampling, NonFiniteLogitsAreRefused) {
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
        -std::numeric_limits<float>::infinity()}) {
    for (const size_t at : {0, 3}) {
      std::vector<float> logits = kLogits;
      logits[at] = bad;
      for (const SamplingOptions& options :
           {SamplingOptions{.temperature = 0}, SamplingOptions{}, SamplingOptions{.top_p = 0.9},
            SamplingOptions{.top_k = 1}}) {
        EXPECT_THROW(sample(host_tensor(logits), options, 0), InvalidArgument);
      }
    }
  }
}

TEST(Sampling, FollowsTheDistribution) {
  const auto unfiltered = frequencies(kLogits, {});
  EXPECT_NEAR(unfiltered.at(0), 0.1, 0.01);
  EXPECT_NEAR(unfiltered.at(1), 0.4, 0.015);
  const auto sharp = frequencies(kLogits, {.temperature = 0.5, .seed = 4});  // squares the weights
  EXPECT_NEAR(sharp.at(1), 0.16 / 0.30, 0.015);
  EXPECT_NEAR(sharp.at(0), 0.01 / 0.30, 0.01);
}

TEST(Sampling, TopPKeepsTheLikeliestShare) {
  const auto nucleus = frequencies(kLogits, {.top_p = 0.6});
  EXPECT_EQ(nucleus.size(), 2u);
  EXPECT_NEAR(nucleus.at(1), 0.4 / 0.7, 0.015);
  EXPECT_EQ(frequencies(kLogits, {.top_p = 1e-9}).size(), 1u);
}

TEST(Sampling, TopPAppliesToTheTokensThatTopKKeeps) {
  const auto two = frequencies(kLogits, {.top_k = 2});
  EXPECT_EQ(two.size(), 2u);
  EXPECT_NEAR(two.at(1), 0.4 / 0.7, 0.015);
  EXPECT_NEAR(two.at(3), 0.3 / 0.7, 0.015);
  EXPECT_EQ(frequencies(kLogits, {.top_k = 1}).begin()->first, 1);
  EXPECT_EQ(frequencies(kLogits, {.top_k = 2, .top_p = 0.5}).size(), 1u);  // 4/7 of the two
  for (const int64_t all : {0, 4, 9}) {
    for (uint64_t i = 0; i < 100; ++i) {
      EXPECT_EQ(draw({.top_k = all}, i), draw({}, i));
    }
  }
}

TEST(StopText, EndsBeforeTheFirstStopAndHoldsBackItsPrefixes) {
  const auto said = [](std::vector<std::string> stops, const std::string& bytes) {
    StopText text(std::move(stops));
    std::string all;
    for (const char c : bytes) all += text.add(c);
    return all + "|" + text.rest() + "|" + (text.stop() ? *text.stop() : "none");
  };
  EXPECT_EQ(said({}, "abc"), "abc||none");
  EXPECT_EQ(said({"\n\n"}, "ab\ncd\n"), "ab\ncd|\n|none");
  EXPECT_EQ(said({"\n\n"}, "ab\n\ncd"), "ab||\n\n");
  EXPECT_EQ(said({"aab"}, "aaaab"), "aa||aab");
  EXPECT_EQ(said({"b", "aab"}, "aaaab"), "aa||aab");  // both end there: the longer began first
  EXPECT_EQ(said({"abc", "b"}, "xab"), "xa||b");
  EXPECT_EQ(said({"x"}, "xyz"), "||x");
  EXPECT_THROW(StopText({""}), InvalidArgument);
}

TEST(Sampling, IsAFunctionOfSeedAndStep) {
  int differ = 0;
  for (uint64_t i = 0; i < 100; ++i) {
    EXPECT_EQ(draw({.seed = 7}, i), draw({.seed = 7}, i));
    differ += draw({.seed = 7}, i) != draw({.seed = 8}, i);
  }
  EXPECT_GT(differ, 20);
}

TEST(Sampling, RefusesOptionsOutOfRange) {
  EXPECT_THROW(check({.temperature = -1}), InvalidArgument);
  EXPECT_THROW(check({.temperature = std::numeric_limits<double>::quiet_NaN()}), InvalidArgument);
  EXPECT_THROW(check({.top_p = 0}), InvalidArgument);
  EXPECT_THROW(check({.top_k = -1}), InvalidArgument);
  EXPECT_THROW(check({.top_p = 1.1}), InvalidArgument);
  EXPECT_NO_THROW(check({.temperature = 0, .top_p = 1}));
}

}  // namespace
}  // namespace tandem
