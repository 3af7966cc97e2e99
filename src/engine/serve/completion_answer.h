// Answers to requests for texts: JSON as OpenAI's clients read it, whole or as server-sent events.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/infer/engine.h"
#include "engine/serve/completion_request.h"
#include "engine/serve/tool_calls.h"
#include "engine/tokenizer/text_decoder.h"

namespace tandem {

class CompletionAnswer {
 public:
  /// `model` must outlive this. `id`: of the answer, unique.
  CompletionAnswer(const ServedModel& model, const CompletionRequest& request, std::string id);

  /// Events that begin a stream: the role of a chat's message.
  std::string begin() const;
  /// Adds a token of a choice, which has not failed; returns its event in a stream, "" if none of
  /// its text is final yet or the answer is whole.
  std::string add(size_t choice, const TokenEvent& token);
  /// Whether all choices are finished.
  bool is_done() const { return num_finished_ == choices_.size(); }
  /// Events that end a stream.
  std::string end() const;
  /// The answer as one object.
  std::string whole() const;
  int64_t tokens() const { return tokens_; }

 private:
  struct LogProb {
    int32_t token;
    float value;
    std::vector<Sampled> alternatives;
  };
  struct Choice {
    Utf8Stream characters;  ///< a model of bytes writes parts of them
    std::string text;
    std::optional<ToolCallReader> tools;  ///< if the request has functions
    std::vector<ToolCall> calls;
    std::vector<LogProb> log_probs;
    const char* finish = nullptr;
  };
  nlohmann::ordered_json head(const char* object) const;
  nlohmann::ordered_json usage() const;
  /// Call `index` of a choice.
  nlohmann::ordered_json call_json(size_t choice, size_t index) const;
  nlohmann::ordered_json log_probs_json(std::span<const LogProb> log_probs) const;
  /// A token of a chat with its log-probability.
  nlohmann::ordered_json token_json(int32_t token, float log_prob) const;
  std::string event(nlohmann::ordered_json choice) const;
  std::string text_of(int32_t token) const;

  const ServedModel& model_;
  const bool is_chat_, streams_, includes_usage_, wants_log_probs_, has_alternatives_;
  const int64_t prompt_tokens_;
  const std::string id_;
  const int64_t created_;           ///< s since 1970
  std::vector<std::string> tools_;  ///< names, which readers of choices point to
  std::vector<Choice> choices_;
  size_t num_finished_ = 0;
  int64_t tokens_ = 0;
};

/// The list of models: the one that is served.
std::string models_json(const ServedModel& model);

}  // namespace tandem
