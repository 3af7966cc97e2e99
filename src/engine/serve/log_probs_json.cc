#include "engine/serve/log_probs_json.h"

#include <algorithm>
#include <utility>

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

/// Text of a token for itself, valid UTF-8.
std::string token_text(const StoredModel& stored, int32_t token) {
  Utf8Stream characters;
  std::string text = characters.add(token_bytes(stored, token));
  return text += characters.rest();
}

/// A token of a chat with its log-probability.
Json token_json(const StoredModel& stored, int32_t token, float log_prob) {
  const std::string text = token_bytes(stored, token);
  Json bytes = Json::array();
  for (const char byte : text) bytes.push_back(uint8_t(byte));
  return {{"token", text}, {"logprob", log_prob}, {"bytes", bytes}};
}

}  // namespace

int64_t TextOffset::add(std::string_view bytes) {
  const int64_t before = count_;
  for (const char c : characters_.add(bytes)) count_ += (uint8_t(c) & 0xc0) != 0x80;
  return before;
}

std::string token_bytes(const StoredModel& stored, int32_t token) {
  if (!stored.tokenizer) return token < 256 ? std::string(1, char(token)) : "";
  std::string text;
  bool is_begin = false;
  stored.tokenizer->decode(token, false, is_begin, text);
  return text;
}

Json chat_log_probs(const StoredModel& stored, std::span<const LogProb> tokens) {
  Json content = Json::array();
  for (const LogProb& each : tokens) {
    Json token = token_json(stored, each.token, each.value.value_or(0));
    token["top_logprobs"] = Json::array();
    for (const auto& [other, log_prob] : each.alternatives) {
      token["top_logprobs"].push_back(token_json(stored, other, log_prob));
    }
    content.push_back(std::move(token));
  }
  return {{"content", content}};
}

Json text_log_probs(const StoredModel& stored, std::span<const LogProb> tokens,
                    bool has_alternatives) {
  Json texts = Json::array(), values = Json::array(), offsets = Json::array(),
       alternatives = Json::array();
  for (const LogProb& each : tokens) {
    texts.push_back(token_bytes(stored, each.token));
    offsets.push_back(each.offset);
    values.push_back(each.value ? Json(*each.value) : Json(nullptr));
    if (!each.value) {
      alternatives.push_back(nullptr);
      continue;
    }
    // The likeliest of tokens with the same text, such as parts of characters, remains.
    Json others = Json::object();
    const auto add_other = [&](int32_t token, float log_prob) {
      const std::string text = token_text(stored, token);
      if (!others.contains(text)) others[text] = log_prob;
    };
    for (const auto& [token, log_prob] : each.alternatives) add_other(token, log_prob);
    add_other(each.token, *each.value);
    alternatives.push_back(std::move(others));
  }
  return {{"tokens", texts},
          {"token_logprobs", values},
          {"top_logprobs", has_alternatives ? std::move(alternatives) : Json(nullptr)},
          {"text_offset", offsets}};
}

Json prompt_log_probs(const StoredModel& stored, std::span<const int32_t> prompt,
                      std::span<const TokenScore> scores, size_t count) {
  Json all = Json::array({nullptr});
  for (size_t i = 0; i < scores.size(); ++i) {
    Json tokens = Json::object();
    const auto add = [&](int32_t token, float log_prob, int64_t rank) {
      tokens[std::to_string(token)] = {
          {"logprob", log_prob}, {"rank", rank}, {"decoded_token", token_text(stored, token)}};
    };
    add(prompt[i + 1], scores[i].log_prob, scores[i].rank);
    for (size_t k = 0; k < std::min(count, scores[i].likeliest.size()); ++k) {
      const auto& [token, log_prob] = scores[i].likeliest[k];
      if (token != prompt[i + 1]) add(token, log_prob, int64_t(k) + 1);
    }
    all.push_back(std::move(tokens));
  }
  return all;
}

}  // namespace tandem
