#include "infer/sampling.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <vector>

#include "tandem/error.h"

namespace tandem {
namespace {

std::map<int32_t, double> frequencies(const std::vector<float>& logits,
                                      const SamplingOptions& options) {
  std::map<int32_t, double> counts;
  constexpr int kDraws = 20000;
  for (uint64_t i = 0; i < kDraws; ++i) counts[sample(logits, options, i)] += 1.0 / kDraws;
  return counts;
}

const std::vector<float> kLogits{std::log(0.1f), std::log(0.4f), std::log(0.2f), std::log(0.3f)};

TEST(Sampling, TemperatureZeroTakesTheLikeliest) {
  const auto only = frequencies(kLogits, {.temperature = 0});
  ASSERT_EQ(only.size(), 1u);
  EXPECT_EQ(only.begin()->first, 1);
}

TEST(Sampling, FollowsTheDistribution) {
  const auto plain = frequencies(kLogits, {});
  EXPECT_NEAR(plain.at(0), 0.1, 0.01);
  EXPECT_NEAR(plain.at(1), 0.4, 0.015);
  const auto sharp = frequencies(kLogits, {.temperature = 0.5, .seed = 4});  // squares the weights
  EXPECT_NEAR(sharp.at(1), 0.16 / 0.30, 0.015);
  EXPECT_NEAR(sharp.at(0), 0.01 / 0.30, 0.01);
}

TEST(Sampling, TopPKeepsTheLikeliestShare) {
  const auto kept = frequencies(kLogits, {.top_p = 0.6});
  EXPECT_EQ(kept.size(), 2u);
  EXPECT_NEAR(kept.at(1), 0.4 / 0.7, 0.015);
  EXPECT_EQ(frequencies(kLogits, {.top_p = 1e-9}).size(), 1u);
}

TEST(Sampling, IsAFunctionOfSeedAndStep) {
  int differ = 0;
  for (uint64_t i = 0; i < 100; ++i) {
    EXPECT_EQ(sample(kLogits, {.seed = 7}, i), sample(kLogits, {.seed = 7}, i));
    differ += sample(kLogits, {.seed = 7}, i) != sample(kLogits, {.seed = 8}, i);
  }
  EXPECT_GT(differ, 20);
}

TEST(Sampling, RefusesOptionsOutOfRange) {
  EXPECT_THROW(check({.temperature = -1}), InvalidArgument);
  EXPECT_THROW(check({.temperature = std::numeric_limits<double>::quiet_NaN()}), InvalidArgument);
  EXPECT_THROW(check({.top_p = 0}), InvalidArgument);
  EXPECT_THROW(check({.top_p = 1.1}), InvalidArgument);
  EXPECT_NO_THROW(check({.temperature = 0, .top_p = 1}));
}

}  // namespace
}  // namespace tandem
