// Requests for texts, in the JSON that OpenAI's clients send to /v1/completions and
// /v1/chat/completions. A field that would change the text and is not supported is refused.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/chat/chat_template.h"
#include "engine/checkpoint/stored_model.h"
#include "engine/infer/engine.h"
#include "engine/serve/api_error.h"

namespace tandem {

struct ServedModel {
  const StoredModel* stored = nullptr;
  std::string name;                  ///< that requests must give, if they give one
  std::optional<ChatTemplate> chat;  ///< nullopt: chats are refused
  std::string chat_problem;          ///< why, then
  SamplingOptions sampling;          ///< where a request says nothing, as the next
  LogitsProcessors rules;
  std::vector<int32_t> eos_token_ids;  ///< tokens that end a text; empty: special ones
  int64_t capacity = 0;                ///< max tokens of a prompt and its text
};

struct CompletionRequest {
  bool is_chat = false;
  bool streams = false;
  bool includes_usage = false;  ///< in a stream
  bool wants_log_probs = false;
  bool writes_nothing = false;  ///< max_tokens = 0: the one token of each choice is dropped
  bool includes_stop = false;   ///< the stop string is a part of the text
  bool wants_prompt_log_probs = false;
  int64_t prompt_alternatives = 0;  ///< likeliest tokens next to these
  bool takes_one_call = false;      ///< further calls are dropped
  bool are_functions = false;       ///< calls are answered as older clients read them
  bool echoes = false;              ///< the text begins with the prompt
  std::vector<std::string> echoed;  ///< text of each choice's prompt, if it is echoed
  int64_t prompt_tokens = 0;        ///< of all prompts
  std::vector<std::string> tools;   ///< names of functions whose calls are looked for
  int64_t texts_of_prompt = 1;      ///< `n`
  std::vector<Request> choices;     ///< the `n` texts of the first prompt, then of the next
};

/// Choice i of a prompt has the seed `seed` + i; without a seed a random one. Throws ApiError: 400
/// naming the field, its value and what is expected; 404 for another model.
CompletionRequest parse_completion(const ServedModel& model, std::string_view body, bool is_chat);

/// Tokens of `prompt` in {"prompt": "text"}, as {"tokens": […], "count": n}. Throws ApiError.
std::string answer_tokenize(const ServedModel& model, std::string_view body);

}  // namespace tandem
