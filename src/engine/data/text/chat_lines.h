// Chats in JSON Lines, for a loss on answers only. A template writes the text of a chat. Its
// answers are what {% generation %} marks, or what follows the prompt that it writes for the
// messages before.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "engine/chat/chat_template.h"
#include "engine/data/text/json_lines.h"
#include "engine/tokenizer/text_tokenizer.h"

namespace tandem {

struct RenderedChat {
  std::string text;
  std::vector<TextSpan> answers;  ///< with what ends them; in order
};

/// Text of a chat, as parse_chat returns it. A message of the assistant is an answer unless its
/// `weight` is 0. Throws ConfigError for a chat without answers, one that the template refuses, and
/// one whose answer does not follow the prompt of the messages before it.
RenderedChat render_answers(const ChatTemplate& form, const nlohmann::ordered_json& chat);

class ChatLines : public LineFormat {
 public:
  /// `max_tokens`: of a chat.
  ChatLines(std::shared_ptr<const TextTokenizer> tokenizer, ChatTemplate form, int64_t max_tokens);
  std::string format() const override { return "chat"; }
  std::string name() const override { return tokenizer_->name() + " chats"; }
  /// Tokens of the text, none added. A token is of an answer if a byte of it is.
  LineDocument parse(std::string_view line) const override;
  void append(std::string_view line, std::vector<int32_t>& tokens) const override;

 private:
  std::shared_ptr<const TextTokenizer> tokenizer_;
  ChatTemplate form_;
  int64_t max_tokens_;
};

}  // namespace tandem
