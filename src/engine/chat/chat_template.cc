#include "engine/chat/chat_template.h"

#include <fmt/format.h>

#include <utility>

#include "core/printable.h"
#include "engine/chat/jinja_run.h"
#include "tandem/error.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

const std::string& checked_text(const std::string& source) {
  if (Json::parse(Json(source).dump(-1, ' ', false, Json::error_handler_t::ignore)) != source) {
    throw ConfigError("line 1: bytes that are not UTF-8");
  }
  return source;
}

/// The text without the characters around what is generated.
std::string without_marks(std::string_view text, std::vector<TextSpan>* generated) {
  constexpr size_t kSize = jinja::kGenerationBegin.size();
  static_assert(jinja::kGenerationEnd.size() == kSize);
  std::string result;
  size_t begin = 0;
  for (size_t at = 0; at < text.size();) {
    const std::string_view next = text.substr(at, kSize);
    const bool ends = next == jinja::kGenerationEnd;
    if (next == jinja::kGenerationBegin) begin = result.size();
    if (ends && generated) generated->push_back({begin, result.size()});
    if (ends || next == jinja::kGenerationBegin) {
      at += kSize;
    } else {
      result += text[at++];
    }
  }
  return result;
}

std::shared_ptr<const jinja::Node> parse_named(const SideFiles& side, const char* name) {
  const auto found = side.templates.find(name);
  if (found == side.templates.end()) return nullptr;
  try {
    return jinja::parse(checked_text(found->second.text));
  } catch (const ConfigError& error) {
    throw ConfigError(fmt::format("{}: {}", found->second.file, error.what()));
  }
}

}  // namespace

ChatTemplate::ChatTemplate(const std::string& source, std::map<std::string, std::string> tokens)
    : root_(jinja::parse(checked_text(source))), tokens_(std::move(tokens)) {}

ChatTemplate::ChatTemplate(const SideFiles& side, std::map<std::string, std::string> tokens)
    : root_(parse_named(side, "default")),
      with_tools_(parse_named(side, "tool_use")),
      tokens_(std::move(tokens)) {
  if (root_) return;
  std::string names;
  for (const auto& [name, text] : side.templates) names += (names.empty() ? "" : ", ") + name;
  throw ConfigError(
      side.templates.empty()
          ? fmt::format("{}: no chat template: expected chat_template.jinja, or chat_template in "
                        "tokenizer_config.json",
                        side.folder)
          : fmt::format("{}: chat templates named {}: expected one named default", side.folder,
                        printable(names)));
}

std::string ChatTemplate::render(const Json& chat, std::vector<TextSpan>* generated) const {
  std::map<std::string, jinja::Value> variables;
  for (const auto& [name, text] : tokens_) variables[name] = jinja::Value(Json(text));
  variables["add_generation_prompt"] = jinja::Value(Json(true));
  if (chat.is_array()) {
    variables["messages"] = jinja::Value(chat);
  } else if (chat.is_object() && chat.contains("messages")) {
    for (const auto& [name, value] : chat.items()) variables[name] = jinja::Value(value);
  } else {
    throw ConfigError("chat: expected a list of messages, or an object with messages");
  }
  size_t number = 0;
  const Json& messages = *variables["messages"].data;
  if (!messages.is_array()) throw ConfigError("chat: messages: expected a list");
  for (const Json& message : messages) {
    ++number;
    if (message.is_object() && message.value("role", Json()).is_string()) continue;
    throw ConfigError(fmt::format("chat: message {}: expected an object with a role", number));
  }
  const bool has_tools = with_tools_ && chat.is_object() && !chat.value("tools", Json()).empty();
  const jinja::Node& root = has_tools ? *with_tools_ : *root_;
  std::string text = jinja::run(root, std::move(variables));
  return root.text.empty() ? text : without_marks(text, generated);
}

}  // namespace tandem
