// Rules of a request by their names in JSON, those of OpenAI's clients and of vLLM.
#pragma once

#include <charconv>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "engine/infer/sampling/logits_processors.h"

namespace tandem {

/// Calls take(name, value) for each rule that is a number.
template <typename Take>
void take_rules(const Take& take, LogitsProcessors& rules) {
  take("repetition_penalty", rules.repetition_penalty);
  take("presence_penalty", rules.presence_penalty);
  take("frequency_penalty", rules.frequency_penalty);
  take("min_p", rules.min_p);
}

constexpr const char* kExpectedLogitBias = "an object of tokens' numbers and biases";

/// {"token": bias, …}; nullopt if `value` is not kExpectedLogitBias.
inline std::optional<std::vector<TokenBias>> parse_logit_bias(const nlohmann::ordered_json& value) {
  if (!value.is_object()) return std::nullopt;
  std::vector<TokenBias> biases;
  for (const auto& [name, bias] : value.items()) {
    int32_t token = 0;
    const char* const end = name.data() + name.size();
    const auto [rest, error] = std::from_chars(name.data(), end, token);
    if (error != std::errc() || rest != end || !bias.is_number()) return std::nullopt;
    biases.push_back({token, bias.get<double>()});
  }
  return biases;
}

}  // namespace tandem
