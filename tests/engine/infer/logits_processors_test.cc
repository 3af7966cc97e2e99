#include "engine/infer/sampling/logits_processors.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "core/host_copy.h"
#include "tandem/error.h"
#include "tandem/random.h"

namespace tandem {
namespace {

constexpr int64_t kVocab = 40;

std::vector<float> random_logits(uint64_t seed) {
  std::vector<float> logits;
  for (int64_t i = 0; i < kVocab; ++i) logits.push_back(3 * normal(seed, 1, uint64_t(i)));
  return logits;
}

/// Logit of a token by the rules, one token at a time; min_p excepted.
double expected_logit(const LogitsProcessors& rules, const std::vector<int32_t>& tokens,
                      size_t prompt, int32_t token, double logit) {
  const auto is_token = [&](int32_t each) { return each == token; };
  if (std::ranges::any_of(tokens, is_token)) {
    logit = logit > 0 ? logit / rules.repetition_penalty : logit * rules.repetition_penalty;
  }
  const auto count = std::count_if(tokens.begin() + int64_t(prompt), tokens.end(), is_token);
  if (count > 0) logit -= rules.presence_penalty + rules.frequency_penalty * double(count);
  for (const TokenBias& each : rules.biases) logit += each.token == token ? each.bias : 0;
  return logit;
}

TEST(LogitsProcessors, ChangeLogitsAsDefined) {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    const auto word = [&](uint64_t i) { return philox(seed, 2, i)[0]; };
    std::vector<int32_t> tokens;
    for (uint64_t i = 0; i < 3 + word(0) % 30; ++i)
      tokens.push_back(int32_t(word(i + 10) % kVocab));
    const size_t prompt = 1 + word(1) % tokens.size();
    LogitsProcessors rules;
    if (word(2) % 2) rules.repetition_penalty = 0.5 + double(word(2) % 100) / 50;
    if (word(3) % 2) rules.presence_penalty = double(word(3) % 400) / 100 - 2;
    if (word(4) % 2) rules.frequency_penalty = double(word(4) % 400) / 100 - 2;
    if (word(5) % 2) rules.biases = {{int32_t(word(5) % kVocab), 7.5}, {3, -20}};
    if (word(6) % 2) rules.min_p = double(word(6) % 90) / 100;
    const double temperature = double(word(7) % 4) / 2;
    const std::vector<float> logits = random_logits(seed);
    std::vector<float> changed = logits;
    apply(rules, tokens, prompt, temperature, host_tensor(changed));
    std::vector<double> expected;
    for (int32_t token = 0; token < kVocab; ++token) {
      expected.push_back(expected_logit(rules, tokens, prompt, token, logits[size_t(token)]));
    }
    const double max = *std::ranges::max_element(expected);
    for (size_t token = 0; token < expected.size(); ++token) {
      // Probabilities, not logits, are compared with min_p.
      const double share = temperature == 0 ? 1 : std::exp((expected[token] - max) / temperature);
      if (std::abs(share - rules.min_p) < 1e-5) continue;
      if (share < rules.min_p) {
        EXPECT_EQ(changed[token], -std::numeric_limits<float>::infinity()) << seed;
      } else {
        EXPECT_NEAR(changed[token], expected[token], 1e-5) << seed;
      }
    }
    if (rules.change_nothing()) {
      EXPECT_EQ(changed, logits);
    }
  }
}

TEST(LogitsProcessors, PenaltiesOfAnySizeChooseAmongTheTokensThatTheyFavour) {
  for (const double penalty : {1e-300, 1e-40, 1e-3, 100.0}) {
    std::vector<float> logits{1, -2, 3e38f, 2, -3e38f};
    const LogitsProcessors rules{.repetition_penalty = penalty};
    check(rules, int64_t(logits.size()));
    const std::vector<float> given(logits.size(), 0);
    apply(rules, std::vector<int32_t>{1, 3, 4}, 3, 1, host_tensor(logits));
    EXPECT_TRUE(std::ranges::all_of(logits, [](float x) { return std::isfinite(x); })) << penalty;
    if (penalty > 1e-30) continue;
    for (const double uniform : {0.0, 0.4, 0.99}) {
      const SampleOptions options{.temperature = 1, .top_p = 1, .top_k = 0, .uniform = uniform};
      const int32_t token = sample_row(given, options, logits).token;
      EXPECT_TRUE(token == 3 || token == 2) << penalty << ": " << token;
    }
  }
}

TEST(LogitsProcessors, ExcludedTokensAreNotChosenAndLogProbsAreThoseWithoutRules) {
  const std::vector<float> logits = random_logits(1);
  std::vector<float> changed = logits;
  apply({.min_p = 0.2}, std::vector<int32_t>{1}, 1, 1.5, host_tensor(changed));
  std::set<int32_t> allowed, chosen;
  for (int32_t token = 0; token < kVocab; ++token) {
    if (std::isfinite(changed[size_t(token)])) allowed.insert(token);
  }
  ASSERT_GT(allowed.size(), 1u);
  ASSERT_LT(allowed.size(), size_t(kVocab));
  const std::vector<Sampled> all = likeliest_tokens(host_tensor(logits), kVocab);
  std::map<int32_t, float> log_probs;
  for (const Sampled& each : all) log_probs[each.token] = each.log_prob;
  for (int i = 0; i <= 1000; ++i) {
    // 1 is beyond all tokens: a rounding remainder.
    const Sampled sampled =
        sample_row(logits, {.temperature = 1.5, .uniform = double(i) / 1000}, changed);
    chosen.insert(sampled.token);
    EXPECT_EQ(sampled.log_prob, log_probs.at(sampled.token));
  }
  EXPECT_EQ(chosen, allowed);
}

TEST(LogitsProcessors, LikeliestTokensAreInOrder) {
  const std::vector<float> logits{1, 3, -2, 3, 2};
  const std::vector<Sampled> three = likeliest_tokens(host_tensor(logits), 3);
  ASSERT_EQ(three.size(), 3u);
  EXPECT_EQ(three[0].token, 1);
  EXPECT_EQ(three[1].token, 3);
  EXPECT_EQ(three[2].token, 4);
  EXPECT_EQ(three[0].log_prob, three[1].log_prob);
  double sum = 0;
  for (const Sampled& each : likeliest_tokens(host_tensor(logits), 100))
    sum += std::exp(each.log_prob);
  EXPECT_NEAR(sum, 1, 1e-6);
  EXPECT_TRUE(likeliest_tokens(host_tensor(logits), 0).empty());
}

TEST(LogitsProcessors, RulesOutOfRangeAreNamed) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const std::pair<LogitsProcessors, const char*> cases[] = {
      {{.repetition_penalty = 0}, "repetition_penalty 0: expected above 0 and at most 100"},
      {{.repetition_penalty = nan}, "repetition_penalty nan: expected"},
      {{.presence_penalty = 2.5}, "presence_penalty 2.5: expected -2 to 2"},
      {{.frequency_penalty = -3}, "frequency_penalty -3: expected -2 to 2"},
      {{.biases = {{40, 1}}}, "logit_bias of token 40: expected 0 to 39"},
      {{.biases = {{-1, 1}}}, "logit_bias of token -1: expected 0 to 39"},
      {{.biases = {{1, 101}}}, "logit_bias 101 of token 1: expected -100 to 100"},
      {{.min_p = 1.5}, "min_p 1.5: expected 0 to 1"},
      {{.min_p = nan}, "min_p nan: expected 0 to 1"}};
  for (const auto& [rules, expected] : cases) {
    try {
      check(rules, kVocab);
      ADD_FAILURE() << "accepted: " << expected;
    } catch (const InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find(expected), std::string::npos) << error.what();
    }
  }
  EXPECT_NO_THROW(check(LogitsProcessors{}, kVocab));
}

}  // namespace
}  // namespace tandem
