// Prompt of a chat: a model's template, a block of Jinja2, makes a text of messages.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "engine/chat/jinja/syntax/jinja_syntax.h"
#include "engine/model/side_files.h"
#include "tandem/error.h"

namespace tandem {

/// Bytes of a text.
struct TextSpan {
  size_t begin = 0, end = 0;
};

/// A model has no template, or no tokenizer for its texts.
class NoChatTemplate : public ConfigError {
 public:
  using ConfigError::ConfigError;
};

class ChatTemplate {
 public:
  /// `tokens`: variables such as bos_token. `file`: of the template, for messages. Throws
  /// ConfigError naming it, the line and what is not understood.
  ChatTemplate(const std::string& source, std::map<std::string, std::string> tokens,
               const std::string& file = "");
  /// The templates of a model's folder: the one named tool_use for chats with tools, if there is
  /// one, else the one named default. `tokens`: texts of special tokens, over those that the folder
  /// names. Throws ConfigError naming the file, NoChatTemplate if there is none.
  ChatTemplate(const SideFiles& side, std::map<std::string, std::string> tokens);

  /// `chat`: messages, a list of objects with role and content, or an object with `messages` and
  /// further variables (tools, …). The text ends where an answer begins, unless
  /// add_generation_prompt is false. `generated`, unless it is nullptr: gets what {% generation %}
  /// marks. Throws ConfigError.
  std::string render(const nlohmann::ordered_json& chat,
                     std::vector<TextSpan>* generated = nullptr) const;

  /// Content of messages that a template reads, as its loops over it tell: a text, a list of
  /// blocks, or either.
  enum class ContentForm : uint8_t { text, either, list };
  /// `has_tools`: whether the chat has tools.
  ContentForm content_form(bool has_tools) const { return chosen(has_tools).content_form; }

 private:
  struct Parsed {
    std::shared_ptr<const jinja::Node> root;  ///< nullptr: there is none of this name
    std::string file;
    ContentForm content_form = ContentForm::text;
  };
  static Parsed parse(const std::string& source, const std::string& file);
  static Parsed parse_named(const SideFiles& side, const char* name);
  const Parsed& chosen(bool has_tools) const {
    return has_tools && with_tools_.root ? with_tools_ : default_;
  }

  Parsed default_, with_tools_;
  std::map<std::string, std::string> tokens_;
};

}  // namespace tandem
