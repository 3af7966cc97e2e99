#include "engine/data/text/chat_lines.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "engine/data/text/chat_messages.h"
#include "tandem/error.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;
using Spans = std::vector<TextSpan>;

std::string render(const ChatTemplate& form, Json chat, size_t messages, bool is_prompt,
                   Spans* generated = nullptr) {
  Json& all = chat["messages"];
  all.erase(all.begin() + long(messages), all.end());
  chat["add_generation_prompt"] = is_prompt;
  try {
    return form.render(chat, generated);
  } catch (const ConfigError& error) {
    throw ConfigError(fmt::format("chat template: {}", error.what()));
  }
}

bool is_blank(std::string_view text) {
  return text.find_first_not_of(" \t\r\n") == text.npos;
}

bool is_of_assistant(const Json& message) {
  return message["role"] == "assistant";
}

/// Whether loss is taken on the message.
bool is_scored(const Json& message) {
  return is_of_assistant(message) && message.value("weight", Json()) != 0;
}

/// Whether it is scored and says something: a text, or calls.
bool has_text(const Json& message) {
  const Json content = message.value("content", Json());
  if (!is_scored(message)) return false;
  return !content.is_string() || !is_blank(content.get<std::string>());
}

/// Length of the longest end of `text` that `other` begins with.
size_t overlap(std::string_view text, std::string_view other) {
  std::vector<size_t> shorter(other.size() + 1);  // next longest border of each prefix
  size_t length = 0;
  const auto extend = [&](char c) {
    while (length > 0 && (length == other.size() || other[length] != c)) length = shorter[length];
    if (length < other.size() && other[length] == c) ++length;
  };
  for (size_t i = 1; i < other.size(); ++i) {
    extend(other[i]);
    shorter[i + 1] = length;
  }
  length = 0;
  for (const char c : text) extend(c);
  return length;
}

/// Span of the answer `message` in the text of the chat. A template may leave out the begin of an
/// answer (a thought) once others follow it.
TextSpan find_answer(const ChatTemplate& form, const Json& chat, size_t message,
                     std::string_view text) {
  const std::string prompt = render(form, chat, message, true);
  const std::string answered = render(form, chat, message + 1, false);
  if (!text.starts_with(prompt) || !answered.starts_with(prompt)) {
    throw ConfigError(
        "chat template: the text before this answer is not its prompt: expected a template whose "
        "chats begin with the prompts for their answers, or one with {% generation %}");
  }
  const std::string_view rest = text.substr(prompt.size());
  const size_t size = overlap(std::string_view(answered).substr(prompt.size()), rest);
  if (is_blank(rest.substr(0, size))) {
    throw ConfigError(
        "every token of this answer is masked: expected a chat template that writes it, and as it "
        "does without the messages after it");
  }
  return {prompt.size(), prompt.size() + size};
}

/// Answers that loss is taken on, of what {% generation %} marks.
Spans scored_spans(const Json& messages, Spans generated) {
  std::vector<bool> scored;
  for (const Json& message : messages) {
    if (is_of_assistant(message)) scored.push_back(is_scored(message));
  }
  if (std::ranges::find(scored, false) == scored.end()) return generated;
  if (scored.size() != generated.size()) {
    throw ConfigError(fmt::format(
        "chat template: {{% generation %}} marks {} spans for {} answers: expected as many where a "
        "weight is 0",
        generated.size(), scored.size()));
  }
  Spans spans;
  for (size_t i = 0; i < scored.size(); ++i) {
    if (scored[i]) spans.push_back(generated[i]);
  }
  return spans;
}

/// Tokens that a span of a text has bytes of.
struct TokenSpan {
  size_t begin = 0, end = 0;
};

/// Finds them by the bytes of the tokens, or if these are not the text (of a tokenizer that changes
/// it), by the tokens of what is before a byte.
class TokenFinder {
 public:
  TokenFinder(const TextTokenizer& tokenizer, std::string_view text,
              std::span<const int32_t> tokens)
      : tokenizer_(tokenizer), text_(text), tokens_(tokens) {
    std::string bytes;
    bool is_begin = true;
    for (const int32_t token : tokens) {
      tokenizer.decode(token, false, is_begin, bytes);
      ends_.push_back(bytes.size());
    }
    if (bytes != text) ends_.clear();
  }
  TokenSpan find(const TextSpan& span) const {
    if (ends_.empty()) return {count_before(span.begin, false), count_before(span.end, true)};
    const auto begin = std::ranges::upper_bound(ends_, span.begin) - ends_.begin();
    const auto last = std::ranges::lower_bound(ends_, span.end) - ends_.begin();
    return {size_t(begin), span.end > span.begin ? size_t(last) + 1 : size_t(begin)};
  }

 private:
  /// Number of the first token that the text before the byte `end` does not have; with the one that
  /// this byte cuts, if `with_cut`.
  size_t count_before(size_t end, bool with_cut) const {
    std::vector<int32_t> before;
    tokenizer_.append_text(text_.substr(0, end), before);
    const auto same = std::ranges::mismatch(before, tokens_);
    const bool is_cut = same.in1 != before.end() && same.in2 != tokens_.end();
    return size_t(same.in2 - tokens_.begin()) + (is_cut && with_cut ? 1 : 0);
  }

  const TextTokenizer& tokenizer_;
  std::string_view text_;
  std::span<const int32_t> tokens_;
  std::vector<size_t> ends_;  ///< of the tokens in the text
};

}  // namespace

RenderedChat render_answers(const ChatTemplate& form, const Json& chat) {
  const Json& messages = chat["messages"];
  if (std::ranges::none_of(messages, is_of_assistant)) {
    throw ConfigError("no answer: expected a message of the assistant (gpt)");
  }
  if (std::ranges::none_of(messages, has_text)) {
    throw ConfigError(
        "every token is masked: expected an answer that is not empty and whose weight is not 0");
  }
  RenderedChat rendered;
  Spans generated;
  rendered.text = render(form, chat, messages.size(), false, &generated);
  if (!generated.empty()) {
    rendered.answers = scored_spans(messages, std::move(generated));
    return rendered;
  }
  for (size_t i = 0; i < messages.size(); ++i) {
    if (!is_scored(messages[i])) continue;
    try {
      rendered.answers.push_back(find_answer(form, chat, i, rendered.text));
    } catch (const ConfigError& error) {
      throw ConfigError(fmt::format("message {}: {}", i + 1, error.what()));
    }
  }
  return rendered;
}

ChatLines::ChatLines(std::shared_ptr<const TextTokenizer> tokenizer, ChatTemplate form,
                     int64_t max_tokens)
    : tokenizer_(std::move(tokenizer)), form_(std::move(form)), max_tokens_(max_tokens) {}

LineDocument ChatLines::parse(std::string_view line) const {
  const RenderedChat chat = render_answers(form_, parse_chat(line));
  LineDocument document;
  document.hash = XXH3_64bits(chat.text.data(), chat.text.size());
  std::vector<int32_t>& tokens = document.tokens;
  tokenizer_->append_text(chat.text, tokens);
  if (int64_t(tokens.size()) > max_tokens_) {
    throw ConfigError(
        fmt::format("{} tokens: expected at most {}, one more than the context (train.seq, --seq)",
                    tokens.size(), max_tokens_));
  }
  const TokenFinder finder(*tokenizer_, chat.text, tokens);
  size_t first = 1;  // nothing predicts token 0
  for (const TextSpan& span : chat.answers) {
    const TokenSpan answer = finder.find(span);
    if (std::max(answer.begin, first) >= answer.end) continue;
    document.answers.push_back(int64_t(std::max(answer.begin, first)));
    document.answers.push_back(int64_t(answer.end));
    first = answer.end;
  }
  if (document.answers.empty()) {
    throw ConfigError("every token is masked: expected an answer that {% generation %} marks");
  }
  return document;
}

void ChatLines::append(std::string_view line, std::vector<int32_t>& tokens) const {
  const Json chat = parse_chat(line);
  tokenizer_->append_text(render(form_, chat, chat["messages"].size(), false), tokens);
}

}  // namespace tandem
