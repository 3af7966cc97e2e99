// Answers to requests for texts: JSON as OpenAI's clients read it, whole or as server-sent events.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/infer/engine.h"
#include "engine/serve/completion_request.h"
#include "engine/serve/log_probs_json.h"
#include "engine/serve/tool_calls.h"
#include "engine/tokenizer/text_decoder.h"

namespace tandem {

class CompletionAnswer {
 public:
  /// `model` must outlive this. `id`: of the answer, unique.
  CompletionAnswer(const ServedModel& model, const CompletionRequest& request, std::string id);

  /// Events that begin a stream: the role of a chat's message. "" without a stream.
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
  struct Choice {
    Utf8Stream characters;  ///< a model of bytes writes parts of them
    std::string text;
    std::optional<ToolCallReader> tools;  ///< if the request has functions
    std::vector<ToolCall> calls;
    std::vector<LogProb> log_probs;
    TextOffset offset;
    std::vector<int32_t> prompt;  ///< if it has scores
    nlohmann::ordered_json prompt_log_probs = nullptr;
    bool has_begun = false;
    const char* finish = nullptr;
    std::string before_text, after_text;  ///< in events that have nothing else
  };
  nlohmann::ordered_json head(const char* object) const;
  nlohmann::ordered_json usage() const;
  /// Call `index` of a choice.
  nlohmann::ordered_json call_json(size_t choice, size_t index) const;
  /// Adds calls of a choice from `begin` on to its message, or to the `delta` of a stream.
  void add_calls(size_t choice, size_t begin, nlohmann::ordered_json& message) const;
  /// Text of a choice that is final with this token; its calls are added to the choice.
  std::string take_text(size_t choice, const TokenEvent& token);
  /// Log-probabilities that a token adds to its choice: of the prompt with the first token, and its
  /// own.
  std::vector<LogProb> take_log_probs(Choice& choice, const TokenEvent& token);
  nlohmann::ordered_json log_probs_json(std::span<const LogProb> log_probs) const;
  /// Choice of an event: a text, and the choice's calls from `first_call` on.
  nlohmann::ordered_json chunk(size_t index, const std::string& text, size_t first_call,
                               std::span<const LogProb> log_probs) const;
  std::string event(nlohmann::ordered_json choice) const;
  /// Event of a text and nothing else, as most of a stream are: all but the text is kept.
  std::string text_event(size_t index, const std::string& text);

  const ServedModel& model_;
  CompletionRequest request_;  ///< without its choices; their readers point to its tools
  const int64_t alternatives_;
  const bool hides_special_;
  const std::string id_;
  const int64_t created_;  ///< s since 1970
  std::vector<Choice> choices_;
  size_t num_finished_ = 0;
  int64_t tokens_ = 0, shared_ = 0;  ///< written; of prompts, in the cache for their first texts
};

/// The list of models: the one that is served.
std::string models_json(const ServedModel& model);
/// The model of this name. Throws ApiError for another.
std::string model_json(const ServedModel& model, std::string_view name);

}  // namespace tandem
