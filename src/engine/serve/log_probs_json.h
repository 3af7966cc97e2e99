// Log-probabilities of tokens in answers, as OpenAI's and vLLM's clients read them.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/checkpoint/stored_model.h"
#include "engine/infer/sampling/logits_processors.h"
#include "engine/tokenizer/text_decoder.h"

namespace tandem {

struct LogProb {
  int32_t token;
  std::optional<float> value;  ///< nullopt: of a prompt's first token
  std::vector<Sampled> alternatives;
  int64_t offset = 0;  ///< characters of the text before the token
};

/// Counts the characters of a text's tokens.
class TextOffset {
 public:
  /// Characters before a token of these bytes, which are added.
  int64_t add(std::string_view bytes);

 private:
  Utf8Stream characters_;
  int64_t count_ = 0;
};

/// Bytes of a token; "" if it has none.
std::string token_bytes(const StoredModel& stored, int32_t token);

/// {"content": […]} of a chat.
nlohmann::ordered_json chat_log_probs(const StoredModel& stored, std::span<const LogProb> tokens);
/// {"tokens", "token_logprobs", "top_logprobs", "text_offset"}; without alternatives if not
/// `has_alternatives`.
nlohmann::ordered_json text_log_probs(const StoredModel& stored, std::span<const LogProb> tokens,
                                      bool has_alternatives);
/// [null, {"token's number": {"logprob", "rank", "decoded_token"}, …}, …] of a prompt, as vLLM has
/// them, with `count` likeliest tokens each.
nlohmann::ordered_json prompt_log_probs(const StoredModel& stored, std::span<const int32_t> prompt,
                                        std::span<const TokenScore> scores, size_t count);

}  // namespace tandem
