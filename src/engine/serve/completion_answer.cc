#include "engine/serve/completion_answer.h"
#include "core/json.h"

#include <fmt/format.h>

#include <ctime>
#include <functional>
#include <nlohmann/json.hpp>
#include <utility>

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

std::string dump(const Json& json) {
  return dump_json(json);
}

const char* finish_reason(Finish finish) {
  return finish == Finish::max_tokens ? "length" : "stop";
}

}  // namespace

CompletionAnswer::CompletionAnswer(const ServedModel& model, const CompletionRequest& request,
                                   std::string id)
    : model_(model),
      is_chat_(request.is_chat),
      streams_(request.streams),
      includes_usage_(request.includes_usage),
      wants_log_probs_(request.wants_log_probs),
      has_alternatives_(request.choices.front().alternatives > 0),
      prompt_tokens_(request.prompt_tokens),
      id_((request.is_chat ? "chatcmpl-" : "cmpl-") + std::move(id)),
      created_(std::time(nullptr)),
      tools_(request.tools),
      choices_(request.choices.size()) {
  for (Choice& choice : choices_) {
    if (!tools_.empty()) choice.tools.emplace(tools_);
  }
}

Json CompletionAnswer::head(const char* object) const {
  return {{"id", id_}, {"object", object}, {"created", created_}, {"model", model_.name}};
}

Json CompletionAnswer::usage() const {
  return {{"prompt_tokens", prompt_tokens_},
          {"completion_tokens", tokens_},
          {"total_tokens", prompt_tokens_ + tokens_}};
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

std::string CompletionAnswer::text_of(int32_t token) const {
  if (!model_.stored->tokenizer) return token < 256 ? std::string(1, char(token)) : "";
  std::string text;
  bool is_begin = false;
  model_.stored->tokenizer->decode(token, false, is_begin, text);
  return text;
}

Json CompletionAnswer::token_json(int32_t token, float log_prob) const {
  const std::string text = text_of(token);
  Json bytes = Json::array();
  for (const char byte : text) bytes.push_back(uint8_t(byte));
  return {{"token", text}, {"logprob", log_prob}, {"bytes", bytes}};
}

Json CompletionAnswer::log_probs_json(std::span<const LogProb> log_probs) const {
  if (!wants_log_probs_) return nullptr;
  Json content = Json::array(), tokens = Json::array(), values = Json::array(),
       alternatives = Json::array();
  for (const LogProb& each : log_probs) {
    if (is_chat_) {
      Json token = token_json(each.token, each.value);
      token["top_logprobs"] = Json::array();
      for (const auto& [other, log_prob] : each.alternatives) {
        token["top_logprobs"].push_back(token_json(other, log_prob));
      }
      content.push_back(std::move(token));
      continue;
    }
    tokens.push_back(text_of(each.token));
    values.push_back(each.value);
    // The likeliest of tokens with the same text, such as parts of characters, remains.
    Json others = Json::object();
    const auto add_other = [&](int32_t token, float log_prob) {
      Utf8Stream characters;
      std::string text = characters.add(text_of(token));
      text += characters.rest();
      if (!others.contains(text)) others[text] = log_prob;
    };
    for (const auto& [token, log_prob] : each.alternatives) add_other(token, log_prob);
    add_other(each.token, each.value);
    alternatives.push_back(std::move(others));
  }
  if (is_chat_) return {{"content", content}};
  return {{"tokens", tokens},
          {"token_logprobs", values},
          {"top_logprobs", has_alternatives_ ? std::move(alternatives) : Json(nullptr)}};
}

std::string CompletionAnswer::event(Json choice) const {
  Json json = head(is_chat_ ? "chat.completion.chunk" : "text_completion");
  json["choices"] = Json::array({std::move(choice)});
  return "data: " + dump(json) + "\n\n";
}

std::string CompletionAnswer::begin() const {
  std::string events;
  for (size_t i = 0; is_chat_ && i < choices_.size(); ++i) {
    events += event({{"index", i},
                     {"delta", {{"role", "assistant"}, {"content", ""}}},
                     {"logprobs", nullptr},
                     {"finish_reason", nullptr}});
  }
  return events;
}

std::string CompletionAnswer::add(size_t index, const TokenEvent& token) {
  Choice& choice = choices_[index];
  ++tokens_;
  std::string text = choice.characters.add(token.text);
  if (token.finish) text += choice.characters.rest();
  const size_t num_calls = choice.calls.size();
  if (choice.tools) {
    text = choice.tools->add(text);
    if (token.finish) text += choice.tools->rest();
    for (ToolCall& call : choice.tools->take()) choice.calls.push_back(std::move(call));
  }
  choice.text += text;
  const bool is_text = token.finish != Finish::end_token;
  const LogProb log_prob{token.token, token.log_prob, token.alternatives};
  if (is_text && wants_log_probs_) choice.log_probs.push_back(log_prob);
  if (token.finish) {
    choice.finish = finish_reason(*token.finish);
    if (!choice.calls.empty() && token.finish != Finish::max_tokens) choice.finish = "tool_calls";
    ++num_finished_;
  }
  const bool is_empty = text.empty() && choice.calls.size() == num_calls;
  if (!streams_ || (is_empty && !token.finish && !wants_log_probs_)) return "";
  Json json{{"index", index}};
  if (is_chat_) {
    json["delta"] = text.empty() ? Json::object() : Json{{"content", text}};
    for (size_t i = num_calls; i < choice.calls.size(); ++i) {
      Json call{{"index", i}};
      call.update(call_json(index, i));
      json["delta"]["tool_calls"].push_back(std::move(call));
    }
  } else {
    json["text"] = text;
  }
  json["logprobs"] = log_probs_json({&log_prob, size_t(is_text)});
  json["finish_reason"] = choice.finish ? Json(choice.finish) : Json(nullptr);
  return event(std::move(json));
}

std::string CompletionAnswer::end() const {
  std::string events;
  if (includes_usage_) {
    Json json = head(is_chat_ ? "chat.completion.chunk" : "text_completion");
    json["choices"] = Json::array();
    json["usage"] = usage();
    events = "data: " + dump(json) + "\n\n";
  }
  return events + "data: [DONE]\n\n";
}

std::string CompletionAnswer::whole() const {
  Json json = head(is_chat_ ? "chat.completion" : "text_completion");
  Json choices = Json::array();
  for (size_t i = 0; i < choices_.size(); ++i) {
    const Choice& choice = choices_[i];
    Json each{{"index", i}};
    if (is_chat_) {
      each["message"] = {{"role", "assistant"}, {"content", choice.text}};
      for (size_t call = 0; call < choice.calls.size(); ++call) {
        each["message"]["tool_calls"].push_back(call_json(i, call));
      }
      if (choice.text.empty() && !choice.calls.empty()) each["message"]["content"] = nullptr;
    } else {
      each["text"] = choice.text;
    }
    each["logprobs"] = log_probs_json(choice.log_probs);
    each["finish_reason"] = choice.finish;
    choices.push_back(std::move(each));
  }
  json["choices"] = std::move(choices);
  json["usage"] = usage();
  return dump(json);
}

std::string models_json(const ServedModel& model) {
  return dump({{"object", "list"},
               {"data", Json::array({{{"id", model.name},
                                      {"object", "model"},
                                      {"created", 0},
                                      {"owned_by", "tandem"},
                                      {"max_model_len", model.capacity}}})}});
}

}  // namespace tandem
