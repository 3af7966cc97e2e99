// "logit_bias" of a request, as OpenAI's clients send it: {"token": bias, …}.
#pragma once

#include <charconv>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "engine/infer/logit_rules.h"

namespace tandem {

constexpr const char* kExpectedLogitBias = "an object of tokens' numbers and biases";

/// nullopt if `value` is not kExpectedLogitBias.
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
