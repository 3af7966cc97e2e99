#include "engine/serve/completion_request.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>
#include <utility>

#include "core/system/json.h"
#include "core/system/printable.h"
#include "engine/infer/sampling/invalid_field.h"
#include "engine/serve/chat_request.h"
#include "engine/serve/prompt_tokens.h"
#include "engine/serve/request_fields.h"
#include "engine/serve/request_json.h"
#include "engine/serve/tool_calls.h"
#include "tandem/error.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

constexpr int64_t kMaxChoices = 128;
constexpr int64_t kDefaultMaxTokens = 16;  // OpenAI's of a completion

/// Fields that templates see, as clients have written them.
constexpr std::string_view kTemplateFields[] = {"messages", "tools", "functions", "documents",
                                                "chat_template_kwargs"};

/// Makes integers beyond 64 bits numbers, as other JSON has them.
void round_integers(Json& json) {
  if (json.is_binary()) {
    const std::vector<uint8_t>& digits = json.get_binary();
    json = std::strtod(std::string(digits.begin(), digits.end()).c_str(), nullptr);
  }
  if (json.is_structured()) std::ranges::for_each(json, round_integers);
}

Json parse_body(std::string_view body) {
  Json root = parse_json_exactly(body);
  if (root.is_discarded()) {
    throw ApiError(400, fmt::format("body: {}: expected a JSON object", json_error(body)));
  }
  if (!root.is_object()) throw ApiError(400, "body: expected a JSON object");
  for (auto& [name, value] : root.items()) {
    if (std::ranges::find(kTemplateFields, name) == std::end(kTemplateFields))
      round_integers(value);
  }
  return root;
}

void check_model(const ServedModel& model, const Json& root) {
  std::string name = model.name;
  take(root, "model", name);
  if (name == model.name) return;
  throw ApiError(404, fmt::format("model = {}: expected {}", printable(name), model.name), "model",
                 "model_not_found");
}

struct Prompt {
  std::vector<int32_t> tokens;
  bool has_text = true;
  std::string text = {};  ///< empty for tokens
};

[[noreturn]] void reject_length(const ServedModel& model, const std::string& length,
                                const char* field) {
  throw ApiError(400,
                 fmt::format("{} of {} tokens: expected fewer than the context of {}", field,
                             length, model.capacity),
                 field, "context_length_exceeded");
}

Prompt tokens_prompt(const ServedModel& model, const Json& list) {
  if (int64_t(list.size()) >= model.capacity) {
    reject_length(model, fmt::to_string(list.size()), "prompt");
  }
  if (list.empty()) reject("prompt", list, "at least one token");
  Prompt prompt;
  for (const Json& token : list) {
    if (!is_token(token) || token.get<int64_t>() >= model.stored->config.vocab) {
      reject("prompt", token, fmt::format("tokens from 0 to {}", model.stored->config.vocab - 1));
    }
    prompt.tokens.push_back(token.get<int32_t>());
  }
  return prompt;
}

/// Tokens of a text by `encode`, which may refuse it.
template <typename Encode>
std::vector<int32_t> encoded(const char* field, const Encode& encode) {
  try {
    return encode();
  } catch (const InvalidArgument& error) {
    throw ApiError(400, error.what(), field);
  }
}

/// Refuses a text that is too long for the context before it is encoded.
void check_bytes(const ServedModel& model, const std::string& text, const char* field) {
  const int64_t min = min_tokens(*model.stored, text.size());
  if (min < model.capacity) return;
  reject_length(model, fmt::format("{} bytes, which count as at least {}", text.size(), min),
                field);
}

Prompt text_prompt(const ServedModel& model, const Json& text) {
  const auto& value = text.get_ref<const std::string&>();
  check_bytes(model, value, "prompt");
  if (value.empty() && model.stored->tokenizer && model.stored->tokenizer->separator() < 0) {
    reject("prompt", text, "at least one token: the model's tokenizer adds none");
  }
  Prompt prompt{{}, !value.empty(), value};
  prompt.tokens = encoded("prompt", [&] { return make_prompt(*model.stored, value); });
  return prompt;
}

std::vector<Prompt> parse_prompts(const ServedModel& model, const Json& root) {
  if (!has(root, "prompt")) throw ApiError(400, "prompt: expected a text", "prompt");
  const Json& value = root["prompt"];
  if (value.is_string()) return {text_prompt(model, value)};
  constexpr auto kExpected = "a text, a list of texts, of tokens, or of lists of tokens";
  if (!value.is_array() || value.empty()) reject("prompt", value, kExpected);
  if (value[0].is_number()) return {tokens_prompt(model, value)};
  if (int64_t(value.size()) > kMaxChoices) {
    reject("prompt", value, fmt::format("at most {} texts", kMaxChoices));
  }
  std::vector<Prompt> prompts;
  for (const Json& each : value) {
    if (!each.is_string() && !each.is_array()) reject("prompt", value, kExpected);
    prompts.push_back(each.is_string() ? text_prompt(model, each) : tokens_prompt(model, each));
  }
  return prompts;
}

/// Fields that all texts of a request share.
Request common_request(const ServedModel& model, const Json& root, bool is_chat) {
  Request request;
  request.eos_token_ids = model.eos_token_ids;
  request.sampling = model.sampling;
  request.rules = model.rules;
  request.max_tokens = is_chat ? model.capacity : kDefaultMaxTokens;
  request.sampling.seed = std::random_device()();
  take_client_fields(root, request, reject);
  if (is_chat) take(root, "max_completion_tokens", request.max_tokens);
  const bool is_newer = is_chat && has(root, "max_completion_tokens");
  const char* const limit = is_newer ? "max_completion_tokens" : "max_tokens";
  if (request.max_tokens < 0) reject(limit, root[limit], "0 or more");
  if (request.sampling.top_k < -1) reject("top_k", root["top_k"], "-1 or 0 (all), or more");
  if (request.sampling.top_k == -1) request.sampling.top_k = 0;  // all, as vLLM has it
  bool ignores_end = false;
  take(root, "ignore_eos", ignores_end);
  if (ignores_end) request.eos_token_ids = {-1};  // no token
  return request;
}

/// Returns the number of other tokens whose log-probabilities are asked for.
int64_t take_log_probs(const Json& root, CompletionRequest& completion) {
  const char* const name = completion.is_chat ? "top_logprobs" : "logprobs";
  int64_t alternatives = 0;
  take(root, name, alternatives);
  if (alternatives < 0 || alternatives > kMaxAlternatives) {
    reject(name, root[name], fmt::format("0 to {}", kMaxAlternatives));
  }
  if (completion.is_chat) {
    take(root, "logprobs", completion.wants_log_probs);
    if (alternatives > 0 && !completion.wants_log_probs) {
      reject(name, root[name], "0, unless logprobs = true");
    }
  } else {
    completion.wants_log_probs = has(root, name);
  }
  return alternatives;
}

/// Returns the number of likeliest tokens to score a prompt with; -1 if it has no scores.
int64_t take_prompt_log_probs(const Json& root, const Request& common,
                              CompletionRequest& completion) {
  int64_t alternatives = -1;
  take(root, "prompt_logprobs", alternatives);
  completion.wants_prompt_log_probs = has(root, "prompt_logprobs");
  if (completion.wants_prompt_log_probs && (alternatives < 0 || alternatives > kMaxAlternatives)) {
    reject("prompt_logprobs", root["prompt_logprobs"], fmt::format("0 to {}", kMaxAlternatives));
  }
  completion.prompt_alternatives = alternatives;
  if (!completion.is_chat) take(root, "echo", completion.echoes);
  if (!completion.echoes || !completion.wants_log_probs) return alternatives;
  return std::max(alternatives, common.alternatives);
}

Prompt parse_chat(const ServedModel& model, const Json& root, CompletionRequest& completion,
                  Request& common) {
  const ChatTools tools = parse_tools(root);
  completion.are_functions = completion.takes_one_call = tools.are_functions;
  bool is_parallel = true;
  take(root, "parallel_tool_calls", is_parallel);
  if (!is_parallel) completion.takes_one_call = true;
  if (!tools.list.is_null()) {
    completion.tools = tools.names;
    common.shown = call_marker_tokens(*model.stored);
  }
  Prompt prompt;
  prompt.tokens = encoded("messages", [&] {
    if (!model.chat) throw ApiError(400, model.chat_problem, "messages");
    const std::string text = render_chat(*model.chat, root, tools);
    check_bytes(model, text, "messages");
    return make_chat_prompt(*model.stored, text);
  });
  return prompt;
}

std::string echoed_text(const ServedModel& model, const Prompt& prompt, bool hides_special) {
  if (!prompt.text.empty()) return prompt.text;
  if (model.stored->tokenizer) return model.stored->tokenizer->decode(prompt.tokens, hides_special);
  std::string text;
  for (const int32_t token : prompt.tokens) text += token < kBos ? std::string(1, char(token)) : "";
  return text;
}

void take_stream(const Json& root, CompletionRequest& completion) {
  take(root, "stream", completion.streams);
  if (!has(root, "stream_options")) return;
  const Json& options = root["stream_options"];
  if (!options.is_object() || !completion.streams) {
    reject("stream_options", options, "an object, with stream = true");
  }
  for (const auto& [name, value] : options.items()) {
    const bool is_neutral = name == "continuous_usage_stats" && value == false;
    if (name != "include_usage" && name != "include_obfuscation" && !is_neutral) {
      reject("stream_options", options, "include_usage");
    }
  }
  take(options, "include_usage", completion.includes_usage);
}

void check_request(const ServedModel& model, const Request& request, bool is_chat) {
  const auto prompt = int64_t(request.prompt.size());
  if (prompt >= model.capacity) {
    reject_length(model, fmt::to_string(prompt), is_chat ? "messages" : "prompt");
  }
  try {
    check(request, model.stored->config, model.capacity);
  } catch (const InvalidField& error) {
    throw ApiError(400, error.what(), error.field());
  } catch (const InvalidArgument& error) {
    throw ApiError(400, error.what());
  }
}

}  // namespace

CompletionRequest parse_completion(const ServedModel& model, std::string_view body, bool is_chat) {
  const Json root = parse_body(body);
  check_model(model, root);
  check_fields(root, is_chat);
  CompletionRequest completion;
  completion.is_chat = is_chat;
  take_stream(root, completion);
  Request common = common_request(model, root, is_chat);
  common.alternatives = take_log_probs(root, completion);
  common.prompt_alternatives = take_prompt_log_probs(root, common, completion);
  completion.writes_nothing = common.max_tokens == 0;
  if (completion.writes_nothing) common.max_tokens = 1;
  take(root, "include_stop_str_in_output", completion.includes_stop);
  std::vector<Prompt> prompts;
  if (is_chat) {
    prompts.push_back(parse_chat(model, root, completion, common));
  } else {
    prompts = parse_prompts(model, root);
  }
  int64_t choices = 1;
  take(root, "n", choices);
  int64_t best_of = choices;
  take(root, "best_of", best_of);
  if (best_of != choices) reject("best_of", root["best_of"], "n (nothing else is supported)");
  completion.texts_of_prompt = choices;
  if (choices < 1 || choices > kMaxChoices / int64_t(prompts.size())) {
    reject("n", root["n"], fmt::format("at least 1, with at most {} texts in all", kMaxChoices));
  }
  for (const Prompt& prompt : prompts) {
    completion.prompt_tokens += int64_t(prompt.tokens.size());
    for (int64_t i = 0; i < choices; ++i) {
      Request request = common;
      request.prompt = prompt.tokens;
      request.has_text_before = prompt.has_text;
      request.sampling.seed += uint64_t(i);
      check_request(model, request, is_chat);
      if (completion.echoes) {
        completion.echoed.push_back(echoed_text(model, prompt, common.hides_special));
      }
      completion.choices.push_back(std::move(request));
    }
  }
  return completion;
}

std::string answer_tokenize(const ServedModel& model, std::string_view body) {
  const Json root = parse_body(body);
  check_model(model, root);
  std::string text;
  if (!has(root, "prompt")) throw ApiError(400, "prompt: expected a text", "prompt");
  take(root, "prompt", text);
  const auto tokens = encoded("prompt", [&] { return make_prompt(*model.stored, text); });
  return Json{{"tokens", tokens}, {"count", tokens.size()}}.dump();
}

}  // namespace tandem
