#include "engine/serve/completion_request.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>
#include <span>
#include <utility>

#include "core/json.h"
#include "core/printable.h"
#include "engine/model/config_value.h"
#include "engine/serve/prompt_tokens.h"
#include "engine/serve/rules_json.h"
#include "tandem/error.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

constexpr int64_t kMaxChoices = 128;
// Bounds of fields that each of a request's texts has a copy of.
constexpr size_t kMaxStops = 16, kMaxStopBytes = 1024, kMaxBiases = 1024;
constexpr int64_t kDefaultMaxTokens = 16;  // OpenAI's of a completion

constexpr std::string_view kFields[] = {"model",
                                        "max_tokens",
                                        "temperature",
                                        "top_p",
                                        "top_k",
                                        "seed",
                                        "stop",
                                        "stream",
                                        "n",
                                        "logprobs",
                                        "user",
                                        "metadata",
                                        "stream_options",
                                        "ignore_eos",
                                        "min_p",
                                        "presence_penalty",
                                        "frequency_penalty",
                                        "repetition_penalty",
                                        "logit_bias"};

constexpr std::string_view kChatFields[] = {"messages", "max_completion_tokens", "top_logprobs",
                                            "tools", "tool_choice"};

/// Field that is understood with one value, that which changes nothing.
struct NeutralField {
  std::string_view name, value;  ///< value: as JSON
};
constexpr NeutralField kNeutral[] = {{"min_tokens", "0"},
                                     {"skip_special_tokens", "true"},
                                     {"service_tier", R"("auto")"},
                                     {"store", "false"}};
constexpr NeutralField kNeutralText[] = {{"best_of", "1"}, {"echo", "false"}, {"suffix", "null"}};
constexpr NeutralField kNeutralChat[] = {{"response_format", R"({"type":"text"})"},
                                         {"parallel_tool_calls", "true"}};

[[noreturn]] void reject(std::string_view name, const Json& value, std::string_view expected) {
  throw ApiError(400, fmt::format("{} = {}: expected {}", name, printable(value.dump()), expected),
                 std::string(name));
}

bool has(const Json& root, std::string_view name) {
  const auto found = root.find(name);
  return found != root.end() && !found->is_null();
}

template <typename T>
void take(const Json& root, std::string_view name, T& to) {
  if (!has(root, name)) return;
  const Json& value = *root.find(name);
  const std::string_view expected = expected_type<T>(value);
  if (!expected.empty()) reject(name, value, expected);
  to = value.get<T>();
}

/// Whether `name` is a field with one value; throws if it has another.
bool is_neutral(std::span<const NeutralField> fields, const std::string& name, const Json& value) {
  const auto found = std::ranges::find(fields, name, &NeutralField::name);
  if (found == fields.end()) return false;
  if (!value.is_null() && value != Json::parse(found->value)) {
    reject(name, value, fmt::format("{} (nothing else is supported)", found->value));
  }
  return true;
}

void check_fields(const Json& root, bool is_chat) {
  for (const auto& [name, value] : root.items()) {
    if (std::ranges::find(kFields, name) != std::end(kFields)) continue;
    if (is_neutral(kNeutral, name, value)) continue;
    if (is_chat ? std::ranges::find(kChatFields, name) != std::end(kChatFields)
                : name == "prompt") {
      continue;
    }
    if (is_chat ? is_neutral(kNeutralChat, name, value) : is_neutral(kNeutralText, name, value)) {
      continue;
    }
    throw ApiError(400, fmt::format("{}: unknown field", printable(name)), printable(name));
  }
}

Json parse_body(std::string_view body) {
  Json root = parse_json<Json>(body);
  if (!root.is_object()) throw ApiError(400, "body: expected a JSON object");
  return root;
}

void check_model(const ServedModel& model, const Json& root) {
  std::string name = model.name;
  take(root, "model", name);
  if (name == model.name) return;
  throw ApiError(404, fmt::format("model = {}: expected {}", printable(name), model.name), "model",
                 "model_not_found");
}

std::vector<std::string> parse_stops(const Json& value) {
  const std::string expected = fmt::format(
      "a string or a list of up to {} strings, each of at most {} bytes", kMaxStops, kMaxStopBytes);
  const Json list = value.is_string() ? Json::array({value}) : value;
  if (!list.is_array() || list.size() > kMaxStops) reject("stop", value, expected);
  std::vector<std::string> stops;
  for (const Json& each : list) {
    if (!each.is_string()) reject("stop", value, expected);
    stops.push_back(each.get<std::string>());
    if (stops.back().size() > kMaxStopBytes) reject("stop", each, expected);
  }
  return stops;
}

struct Prompt {
  std::vector<int32_t> tokens;
  bool has_text = true;
};

[[noreturn]] void reject_length(const ServedModel& model, const std::string& length) {
  throw ApiError(400,
                 fmt::format("prompt of {} tokens: expected fewer than the context of {}", length,
                             model.capacity),
                 "", "context_length_exceeded");
}

Prompt tokens_prompt(const ServedModel& model, const Json& list) {
  if (int64_t(list.size()) >= model.capacity) reject_length(model, fmt::to_string(list.size()));
  Prompt prompt;
  for (const Json& token : list) {
    if (!token.is_number_integer() || token < 0 || token > std::numeric_limits<int32_t>::max()) {
      reject("prompt", token, "tokens");
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
void check_bytes(const ServedModel& model, const std::string& text) {
  const int64_t min = min_tokens(*model.stored, text.size());
  if (min < model.capacity) return;
  reject_length(model, fmt::format("{} bytes, which count as at least {}", text.size(), min));
}

Prompt text_prompt(const ServedModel& model, const Json& text) {
  const auto& value = text.get_ref<const std::string&>();
  check_bytes(model, value);
  return {encoded("prompt", [&] { return make_prompt(*model.stored, value); }), !value.empty()};
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

/// The message with its content as one text, which may be given as a list of texts.
Json flatten(const Json& message) {
  if (!message.is_object() || !has(message, "role") || !message["role"].is_string()) {
    reject("messages", message, "objects with role and content");
  }
  Json flat = message;
  if (!has(message, "content") || !message["content"].is_array()) return flat;
  std::string text;
  for (const Json& chunk : message["content"]) {
    if (!chunk.is_object() || !has(chunk, "type") || chunk["type"] != "text" ||
        !has(chunk, "text") || !chunk["text"].is_string()) {
      reject("messages", chunk, "content of type text");
    }
    text += chunk["text"].get<std::string>();
  }
  flat["content"] = text;
  return flat;
}

/// Arguments of calls in earlier messages, JSON in a text, as the objects that templates expect.
void parse_arguments(Json& message) {
  if (!has(message, "tool_calls")) return;
  if (!message["tool_calls"].is_array()) reject("messages", message, "a list of tool_calls");
  for (Json& call : message["tool_calls"]) {
    if (!call.is_object() || !has(call, "function") || !call["function"].is_object()) {
      reject("messages", call, "tool_calls with a function");
    }
    Json& function = call["function"];
    if (!has(function, "arguments") || !function["arguments"].is_string()) continue;
    Json arguments = parse_json<Json>(function["arguments"].get<std::string>());
    if (!arguments.is_object()) reject("messages", call, "arguments that are a JSON object");
    function["arguments"] = std::move(arguments);
  }
}

/// The functions that a chat may call, and their names in `names`; null if there are none, or none
/// may be called.
Json take_tools(const Json& root, std::vector<std::string>& names) {
  std::string choice = "auto";
  if (has(root, "tool_choice")) {
    const Json& value = root["tool_choice"];
    if (value != "auto" && value != "none") {
      reject("tool_choice", value, R"("auto" or "none" (nothing else is supported))");
    }
    choice = value.get<std::string>();
  }
  if (!has(root, "tools")) return nullptr;
  const Json& tools = root["tools"];
  if (!tools.is_array()) reject("tools", tools, "a list of functions");
  for (const Json& tool : tools) {
    const bool is_function = tool.is_object() && has(tool, "type") && tool["type"] == "function" &&
                             has(tool, "function") && tool["function"].is_object() &&
                             has(tool["function"], "name") && tool["function"]["name"].is_string();
    if (!is_function) reject("tools", tool, "type function, and a function with a name");
    if (choice == "auto") names.push_back(tool["function"]["name"].get<std::string>());
  }
  return names.empty() ? Json(nullptr) : tools;
}

Prompt parse_messages(const ServedModel& model, const Json& root, const Json& tools) {
  if (!model.chat) throw ApiError(400, model.chat_problem, "messages");
  if (!has(root, "messages") || !root["messages"].is_array() || root["messages"].empty()) {
    throw ApiError(400, "messages: expected a list of messages", "messages");
  }
  Json messages = Json::array();
  for (const Json& message : root["messages"]) {
    messages.push_back(flatten(message));
    parse_arguments(messages.back());
  }
  Json chat{{"messages", std::move(messages)}};
  if (!tools.is_null()) chat["tools"] = tools;
  return {encoded("messages",
                  [&] {
                    const std::string text = model.chat->render(chat);
                    check_bytes(model, text);
                    return make_chat_prompt(*model.stored, text);
                  }),
          true};
}

/// Fields that all texts of a request share.
Request common_request(const ServedModel& model, const Json& root, bool is_chat) {
  Request request;
  request.ends = model.ends;
  request.sampling = model.sampling;
  request.rules = model.rules;
  request.max_tokens = is_chat ? model.capacity : kDefaultMaxTokens;
  take(root, "max_tokens", request.max_tokens);
  if (is_chat) take(root, "max_completion_tokens", request.max_tokens);
  take(root, "temperature", request.sampling.temperature);
  take(root, "top_p", request.sampling.top_p);
  take(root, "top_k", request.sampling.top_k);
  if (request.sampling.top_k == -1) request.sampling.top_k = 0;  // all, as vLLM has it
  int64_t seed = int64_t(std::random_device()());
  take(root, "seed", seed);
  request.sampling.seed = uint64_t(seed);
  if (has(root, "stop")) request.stops = parse_stops(root["stop"]);
  take_rules([&](const char* name, double& value) { take(root, name, value); }, request.rules);
  if (has(root, "logit_bias")) {
    auto biases = parse_logit_bias(root["logit_bias"]);
    if (!biases) reject("logit_bias", root["logit_bias"], kExpectedLogitBias);
    if (biases->size() > kMaxBiases) {
      reject("logit_bias", root["logit_bias"], fmt::format("at most {} tokens", kMaxBiases));
    }
    request.rules.biases = std::move(*biases);
  }
  bool ignores_end = false;
  take(root, "ignore_eos", ignores_end);
  if (ignores_end) request.ends = {-1};  // no token
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

void take_stream(const Json& root, CompletionRequest& completion) {
  take(root, "stream", completion.streams);
  if (!has(root, "stream_options")) return;
  const Json& options = root["stream_options"];
  if (!options.is_object() || !completion.streams) {
    reject("stream_options", options, "an object, with stream = true");
  }
  for (const auto& [name, value] : options.items()) {
    const bool is_neutral = name == "continuous_usage_stats" && value == false;
    if (name != "include_usage" && !is_neutral) {
      reject("stream_options", options, "include_usage");
    }
  }
  take(options, "include_usage", completion.includes_usage);
}

void check_request(const ServedModel& model, const Request& request) {
  const auto prompt = int64_t(request.prompt.size());
  if (prompt >= model.capacity) reject_length(model, fmt::to_string(prompt));
  try {
    check(request, model.stored->config, model.capacity);
  } catch (const InvalidArgument& error) {
    throw ApiError(400, error.what());
  }
}

}  // namespace

std::string ApiError::json() const {
  const char* type = status == 429   ? "rate_limit_error"
                     : status == 401 ? "authentication_error"
                     : status >= 500 ? "server_error"
                                     : "invalid_request_error";
  Json error{{"message", what()}, {"type", type}, {"param", nullptr}, {"code", nullptr}};
  if (!param.empty()) error["param"] = param;
  if (!code.empty()) error["code"] = code;
  return Json{{"error", error}}.dump(-1, ' ', false, Json::error_handler_t::replace);
}

CompletionRequest parse_completion(const ServedModel& model, std::string_view body, bool is_chat) {
  const Json root = parse_body(body);
  check_model(model, root);
  check_fields(root, is_chat);
  CompletionRequest completion;
  completion.is_chat = is_chat;
  take_stream(root, completion);
  Request common = common_request(model, root, is_chat);
  common.alternatives = take_log_probs(root, completion);
  std::vector<Prompt> prompts;
  if (is_chat) {
    const Json tools = take_tools(root, completion.tools);
    prompts.push_back(parse_messages(model, root, tools));
  } else {
    prompts = parse_prompts(model, root);
  }
  int64_t choices = 1;
  take(root, "n", choices);
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
      check_request(model, request);
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
