#include "engine/serve/completion_answer.h"

#include <fmt/format.h>

#include <algorithm>
#include <ctime>
#include <functional>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/system/json.h"
#include "core/system/printable.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

std::string dump(const Json& json) {
  return dump_json(json);
}

/// Appends the JSON string of `text`, as `dump` has it.
void append_dump(std::string_view text, std::string& to) {
  const bool stays = std::ranges::all_of(text, [](char c) {
    return uint8_t(c) >= 0x20 && uint8_t(c) < 0x80 && c != '"' && c != '\\';
  });
  if (!stays) {  // has escapes, or bytes that may be no UTF-8
    to += dump(Json(text));
    return;
  }
  to += '"';
  to += text;
  to += '"';
}

const char* finish_reason(Finish finish) {
  return finish == Finish::max_tokens ? "length" : "stop";
}

Json model_entry(const ServedModel& model) {
  return {{"id", model.name},
          {"object", "model"},
          {"created", 0},
          {"owned_by", "tandem"},
          {"max_model_len", model.capacity},
          {"has_chat_template", model.chat.has_value()}};
}

}  // namespace

CompletionAnswer::CompletionAnswer(const ServedModel& model, const CompletionRequest& request,
                                   std::string id)
    : model_(model),
      request_(request),
      alternatives_(request.choices.front().alternatives),
      hides_special_(request.choices.front().hides_special),
      id_((request.is_chat ? "chatcmpl-" : "cmpl-") + std::move(id)),
      created_(std::time(nullptr)),
      choices_(request.choices.size()) {
  request_.choices.clear();
  for (size_t i = 0; i < choices_.size(); ++i) {
    if (!request_.tools.empty()) choices_[i].tools.emplace(request_.tools);
    const Request& each = request.choices[i];
    if (request_.echoes || each.prompt_alternatives >= 0) choices_[i].prompt = each.prompt;
  }
}

Json CompletionAnswer::head(const char* object) const {
  return {{"id", id_}, {"object", object}, {"created", created_}, {"model", model_.name}};
}

Json CompletionAnswer::usage() const {
  return {{"prompt_tokens", request_.prompt_tokens},
          {"completion_tokens", tokens_},
          {"total_tokens", request_.prompt_tokens + tokens_},
          {"prompt_tokens_details", {{"cached_tokens", shared_}}}};
}

Json CompletionAnswer::call_json(size_t choice, size_t index) const {
  // Templates of Mistral want 9 letters or digits.
  constexpr std::string_view kDigits = "0123456789abcdefghijklmnopqrstuvwxyz";
  uint64_t number = std::hash<std::string>()(fmt::format("{} {} {}", id_, choice, index));
  std::string id;
  for (int i = 0; i < 9; ++i, number /= kDigits.size()) id += kDigits[number % kDigits.size()];
  const ToolCall& call = choices_[choice].calls[index];
  return {{"id", id},
          {"type", "function"},
          {"function", {{"name", call.name}, {"arguments", call.arguments}}}};
}

void CompletionAnswer::add_calls(size_t choice, size_t begin, Json& message) const {
  for (size_t i = begin; i < choices_[choice].calls.size(); ++i) {
    Json call = call_json(choice, i);
    if (request_.are_functions) {
      message["function_call"] = std::move(call["function"]);
      continue;
    }
    Json numbered{{"index", i}};
    if (request_.streams) numbered.update(call);
    message["tool_calls"].push_back(request_.streams ? std::move(numbered) : std::move(call));
  }
}

Json CompletionAnswer::log_probs_json(std::span<const LogProb> log_probs) const {
  if (!request_.wants_log_probs) return nullptr;
  return request_.is_chat ? chat_log_probs(*model_.stored, log_probs)
                          : text_log_probs(*model_.stored, log_probs, alternatives_ > 0);
}

std::string CompletionAnswer::event(Json choice) const {
  Json json = head(request_.is_chat ? "chat.completion.chunk" : "text_completion");
  json["choices"] = Json::array({std::move(choice)});
  return "data: " + dump(json) + "\n\n";
}

Json CompletionAnswer::chunk(size_t index, const std::string& text, size_t first_call,
                             std::span<const LogProb> log_probs) const {
  const char* const finish = choices_[index].finish;
  Json json{{"index", index}};
  if (request_.is_chat) {
    json["delta"] = text.empty() ? Json::object() : Json{{"content", text}};
    add_calls(index, first_call, json["delta"]);
  } else {
    json["text"] = text;
  }
  json["logprobs"] = log_probs_json(log_probs);
  json["finish_reason"] = finish ? Json(finish) : Json(nullptr);
  return json;
}

std::string CompletionAnswer::text_event(size_t index, const std::string& text) {
  Choice& choice = choices_[index];
  if (choice.before_text.empty()) {
    const std::string any = "?", quoted = dump(any);
    const std::string whole = event(chunk(index, any, choice.calls.size(), {}));
    const size_t at = whole.rfind(quoted);  // no field after the text has it
    choice.before_text = whole.substr(0, at);
    choice.after_text = whole.substr(at + quoted.size());
  }
  std::string result;
  result.reserve(choice.before_text.size() + text.size() + choice.after_text.size() + 2);
  result += choice.before_text;
  append_dump(text, result);
  return result += choice.after_text;
}

std::string CompletionAnswer::begin() const {
  std::string events;
  for (size_t i = 0; request_.streams && request_.is_chat && i < choices_.size(); ++i) {
    events += event({{"index", i},
                     {"delta", {{"role", "assistant"}, {"content", ""}}},
                     {"logprobs", nullptr},
                     {"finish_reason", nullptr}});
  }
  return events;
}

std::vector<LogProb> CompletionAnswer::take_log_probs(Choice& choice, const TokenEvent& token) {
  std::vector<LogProb> added;
  if (!token.prompt.empty() && request_.wants_prompt_log_probs) {
    choice.prompt_log_probs = prompt_log_probs(*model_.stored, choice.prompt, token.prompt,
                                               size_t(request_.prompt_alternatives));
  }
  const std::vector<int32_t> prompt = std::exchange(choice.prompt, {});
  if (!request_.wants_log_probs) return added;
  for (size_t i = 0; request_.echoes && i < prompt.size(); ++i) {
    added.push_back({prompt[i], {}, {}});
    if (i == 0) continue;
    const TokenScore& score = token.prompt[i - 1];
    added.back().value = score.log_prob;
    const size_t count = std::min(size_t(alternatives_), score.likeliest.size());
    added.back().alternatives.assign(score.likeliest.begin(),
                                     score.likeliest.begin() + int64_t(count));
  }
  // With a prompt the end token is there, too: clients leave out the last one.
  const bool is_there = request_.echoes || token.finish != Finish::end_token;
  if (is_there && !request_.writes_nothing) {
    added.push_back({token.token, token.log_prob, token.alternatives});
  }
  for (LogProb& each : added) {
    const TextTokenizer* const tokenizer = model_.stored->tokenizer.get();
    const bool is_hidden = tokenizer && hides_special_ && tokenizer->is_special(each.token);
    each.offset = choice.offset.add(is_hidden ? "" : token_bytes(*model_.stored, each.token));
  }
  choice.log_probs.insert(choice.log_probs.end(), added.begin(), added.end());
  return added;
}

std::string CompletionAnswer::take_text(size_t index, const TokenEvent& token) {
  Choice& choice = choices_[index];
  if (request_.writes_nothing) return "";
  std::string text = choice.characters.add(token.text);
  if (request_.includes_stop) text += choice.characters.add(token.stop);
  if (token.finish) text += choice.characters.rest();
  if (!choice.tools) return text;
  text = choice.tools->add(text);
  if (token.finish) text += choice.tools->rest();
  for (ToolCall& call : choice.tools->take()) {
    if (choice.calls.empty() || !request_.takes_one_call) choice.calls.push_back(std::move(call));
  }
  return text;
}

std::string CompletionAnswer::add(size_t index, const TokenEvent& token) {
  Choice& choice = choices_[index];
  const bool is_first = !std::exchange(choice.has_begun, true);
  const size_t num_calls = choice.calls.size();
  std::string text = is_first && request_.echoes ? request_.echoed[index] : "";
  text += take_text(index, token);
  if (!request_.streams) choice.text += text;
  if (!request_.writes_nothing) ++tokens_;
  if (int64_t(index) % request_.texts_of_prompt == 0) shared_ += token.shared;
  const std::vector<LogProb> log_probs = take_log_probs(choice, token);
  if (token.finish) {
    choice.finish = finish_reason(request_.writes_nothing ? Finish::max_tokens : *token.finish);
    if (!choice.calls.empty() && token.finish != Finish::max_tokens) {
      choice.finish = request_.are_functions ? "function_call" : "tool_calls";
    }
    ++num_finished_;
  }
  if (!request_.streams) return "";
  const bool has_prompt = is_first && !choice.prompt_log_probs.is_null();
  const bool has_calls = choice.calls.size() > num_calls;
  if (!token.finish && !request_.wants_log_probs && !has_prompt && !has_calls) {
    return text.empty() ? "" : text_event(index, text);
  }
  Json json = chunk(index, text, num_calls, log_probs);
  if (has_prompt) json["prompt_logprobs"] = choice.prompt_log_probs;
  return event(std::move(json));
}

std::string CompletionAnswer::end() const {
  std::string events;
  if (request_.includes_usage) {
    Json json = head(request_.is_chat ? "chat.completion.chunk" : "text_completion");
    json["choices"] = Json::array();
    json["usage"] = usage();
    events = "data: " + dump(json) + "\n\n";
  }
  return events + "data: [DONE]\n\n";
}

std::string CompletionAnswer::whole() const {
  Json json = head(request_.is_chat ? "chat.completion" : "text_completion");
  Json choices = Json::array();
  for (size_t i = 0; i < choices_.size(); ++i) {
    const Choice& choice = choices_[i];
    Json each{{"index", i}};
    if (request_.is_chat) {
      each["message"] = {{"role", "assistant"}, {"content", choice.text}};
      add_calls(i, 0, each["message"]);
      if (choice.text.empty() && !choice.calls.empty()) each["message"]["content"] = nullptr;
    } else {
      each["text"] = choice.text;
    }
    each["logprobs"] = log_probs_json(choice.log_probs);
    each["finish_reason"] = choice.finish;
    if (request_.wants_prompt_log_probs) each["prompt_logprobs"] = choice.prompt_log_probs;
    choices.push_back(std::move(each));
  }
  json["choices"] = std::move(choices);
  json["usage"] = usage();
  return dump(json);
}

std::string models_json(const ServedModel& model) {
  return dump({{"object", "list"}, {"data", Json::array({model_entry(model)})}});
}

std::string model_json(const ServedModel& model, std::string_view name) {
  if (name == model.name) return dump(model_entry(model));
  throw ApiError(404, fmt::format("model {}: expected {}", printable(name), model.name), "model",
                 "model_not_found");
}

}  // namespace tandem
