#include "engine/infer/sampling/logits_processors.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

#include "core/host_copy.h"
#include "engine/infer/sampling/invalid_field.h"
#include "tandem/error.h"

namespace tandem {

void check(const LogitsProcessors& rules, int64_t vocab) {
  const auto require = [](bool is_valid, std::string_view name, double value,
                          std::string_view expected) {
    if (!is_valid) throw InvalidField(name, value, expected);
  };
  const auto is_within = [](double value, double bound) { return std::abs(value) <= bound; };
  require(rules.repetition_penalty > 0 && rules.repetition_penalty <= 100, "repetition_penalty",
          rules.repetition_penalty, "above 0 and at most 100");
  require(is_within(rules.presence_penalty, 2), "presence_penalty", rules.presence_penalty,
          "-2 to 2");
  require(is_within(rules.frequency_penalty, 2), "frequency_penalty", rules.frequency_penalty,
          "-2 to 2");
  require(rules.min_p >= 0 && rules.min_p <= 1, "min_p", rules.min_p, "0 to 1");
  for (const TokenBias& each : rules.biases) {
    if (each.token < 0 || each.token >= vocab) {
      throw InvalidField("logit_bias", fmt::format("of token {}", each.token),
                         fmt::format("0 to {}", vocab - 1));
    }
    if (!is_within(each.bias, 100)) {
      throw InvalidField("logit_bias", fmt::format("{} of token {}", each.bias, each.token),
                         "-100 to 100");
    }
  }
}

void apply(const LogitsProcessors& rules, std::span<const int32_t> tokens, size_t prompt,
           double temperature, const Tensor& row) {
  const std::span logits = host_values(row);
  if (rules.repetition_penalty != 1) {
    constexpr double kMax = std::numeric_limits<float>::max();
    for (const int32_t token : std::unordered_set<int32_t>(tokens.begin(), tokens.end())) {
      const double logit = logits[size_t(token)];
      const double changed =
          logit > 0 ? logit / rules.repetition_penalty : logit * rules.repetition_penalty;
      logits[size_t(token)] = float(std::clamp(changed, -kMax, kMax));
    }
  }
  std::unordered_map<int32_t, int64_t> counts;
  for (const int32_t token : tokens.subspan(prompt)) ++counts[token];
  for (const auto& [token, count] : counts) {
    logits[size_t(token)] -=
        float(rules.presence_penalty + rules.frequency_penalty * double(count));
  }
  for (const TokenBias& each : rules.biases) logits[size_t(each.token)] += float(each.bias);
  if (rules.min_p == 0 || temperature == 0) return;
  const double lowest =
      double(*std::ranges::max_element(logits)) + temperature * std::log(rules.min_p);
  for (float& logit : logits) {
    if (double(logit) < lowest) logit = -std::numeric_limits<float>::infinity();
  }
}

TokenScore score_token(const Tensor& row, int32_t token, size_t count) {
  const std::span logits = host_values(row);
  const float logit = logits[size_t(token)];
  return {float(double(logit) - log_sum_exp(logits)),
          1 + std::ranges::count_if(logits, [&](float other) { return other > logit; }),
          likeliest_tokens(row, count)};
}

std::vector<Sampled> likeliest_tokens(const Tensor& row, size_t count) {
  const std::span logits = host_values(row);
  std::vector<Sampled> likeliest;  // with their logits, up to the end
  count = std::min(count, logits.size());
  for (size_t token = 0; count > 0 && token < logits.size(); ++token) {
    const float logit = logits[token];
    if (likeliest.size() == count) {
      if (!(logit > likeliest.back().log_prob)) continue;
      likeliest.pop_back();
    }
    const auto after = std::ranges::find_if(
        likeliest, [&](const Sampled& other) { return logit > other.log_prob; });
    likeliest.insert(after, {int32_t(token), logit});
  }
  if (count == 0) return likeliest;
  const double normalizer = log_sum_exp(logits);
  for (Sampled& each : likeliest) each.log_prob = float(double(each.log_prob) - normalizer);
  return likeliest;
}

}  // namespace tandem
