// Prompt of a chat: a model's template, a part of Jinja2, makes a text of messages.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "engine/chat/jinja_syntax.h"
#include "engine/model/side_files.h"

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
  /// The templates of a model's folder: the one named tool_use for chats with tools, if there is
  /// one, else the one named default. `tokens`: texts of special tokens. Throws ConfigError naming
  /// the file, and if there is none.
  ChatTemplate(const SideFiles& side, std::map<std::string, std::string> tokens);

  /// `chat`: messages, a list of objects with role and content, or an object with `messages` and
  /// further variables (tools, …). The text ends where an answer begins, unless
  /// add_generation_prompt is false. `generated`, unless it is nullptr: gets what {% generation %}
  /// marks. Throws ConfigError.
  std::string render(const nlohmann::ordered_json& chat,
                     std::vector<TextSpan>* generated = nullptr) const;

 private:
  std::shared_ptr<const jinja::Node> root_;
  std::shared_ptr<const jinja::Node> with_tools_;  ///< nullptr: root_
  std::map<std::string, std::string> tokens_;
};

}  // namespace tandem
