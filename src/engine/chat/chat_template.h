// Prompt of a chat: a model's template, a part of Jinja2, makes a text of messages.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/chat/jinja_syntax.h"

namespace tandem {

/// Bytes of a text.
struct TextSpan {
  size_t begin = 0, end = 0;
};

class ChatTemplate {
 public:
  /// `tokens`: variables such as bos_token. Throws ConfigError naming the line and what is not
  /// understood.
  ChatTemplate(const std::string& source, std::map<std::string, std::string> tokens);

  /// `chat`: messages, a list of objects with role and content, or an object with `messages` and
  /// further variables (tools, …). The text ends where an answer begins, unless
  /// add_generation_prompt is false. `generated`, unless it is nullptr: gets what {% generation %}
  /// marks. Throws ConfigError.
  std::string render(const nlohmann::ordered_json& chat,
                     std::vector<TextSpan>* generated = nullptr) const;

 private:
  std::shared_ptr<const jinja::Node> root_;
  std::map<std::string, std::string> tokens_;
};

/// The template of a model's folder: chat_template.jinja, or chat_template of
/// tokenizer_config.json, there the one named "default" if there are several. Throws ConfigError
/// naming the file, and if there is none.
ChatTemplate read_chat_template(const std::string& folder);

}  // namespace tandem
