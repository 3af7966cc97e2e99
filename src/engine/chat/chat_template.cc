#include "engine/chat/chat_template.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "core/system/printable.h"
#include "engine/chat/jinja/jinja_run.h"
#include "tandem/error.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

/// Whether the expression is content of a message, perhaps of a variable with this name, changed by
/// filters.
bool is_content(const jinja::Node& node) {
  using jinja::Kind;
  if (node.kind == Kind::filter || node.kind == Kind::slice) return is_content(*node.children[0]);
  if (node.kind == Kind::item) {
    const jinja::Value& index = node.children[1]->value;
    return index.is_string() && index.string("") == "content";
  }
  return (node.kind == Kind::attribute || node.kind == Kind::name) && node.text == "content";
}

bool loops_over_content(const jinja::Node& node) {
  return node.kind == jinja::Kind::for_ && is_content(*node.children[1]);
}

bool tests_for_string(const jinja::Node& node) {
  return node.kind == jinja::Kind::test && node.text == "string" && is_content(*node.children[0]);
}

bool contains(const jinja::Node& node, bool (*holds)(const jinja::Node&)) {
  return holds(node) || std::ranges::any_of(node.children, [&](const auto& child) {
           return child && contains(*child, holds);
         });
}

/// Result of `work`, whose errors get the template's name.
template <typename Work>
auto naming(const std::string& name, const Work& work) -> decltype(work()) {
  try {
    return work();
  } catch (const ConfigError& error) {
    if (name.empty()) throw;
    throw ConfigError(fmt::format("{}: {}", name, error.what()));
  }
}

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

}  // namespace

ChatTemplate::Parsed ChatTemplate::parse(const std::string& source, const std::string& file) {
  Parsed parsed{naming(file, [&] { return jinja::parse(checked_text(source)); }), file};
  if (contains(*parsed.root, loops_over_content)) {
    const bool is_either = contains(*parsed.root, tests_for_string);
    parsed.content_form = is_either ? ContentForm::either : ContentForm::list;
  }
  return parsed;
}

ChatTemplate::Parsed ChatTemplate::parse_named(const SideFiles& side, const char* name) {
  const auto found = side.templates.find(name);
  if (found == side.templates.end()) return {};
  return parse(found->second.text, found->second.file);
}

ChatTemplate::ChatTemplate(const std::string& source, std::map<std::string, std::string> tokens,
                           const std::string& file)
    : default_(parse(source, file)), tokens_(std::move(tokens)) {}

ChatTemplate::ChatTemplate(const SideFiles& side, std::map<std::string, std::string> tokens)
    : default_(parse_named(side, "default")),
      with_tools_(parse_named(side, "tool_use")),
      tokens_(std::move(tokens)) {
  for (const auto& [role, text] : side.special_tokens) {
    if (!text.empty()) tokens_.try_emplace(role, text);
  }
  if (default_.root) return;
  if (side.templates.empty()) {
    throw NoChatTemplate(
        fmt::format("{}: no chat template: expected chat_template.jinja, or chat_template in "
                    "tokenizer_config.json",
                    side.folder));
  }
  std::string names;
  for (const auto& [name, text] : side.templates) names += (names.empty() ? "" : ", ") + name;
  throw ConfigError(fmt::format("{}: chat templates named {}: expected one named default",
                                side.folder, printable(names)));
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
  const jinja::Json& messages = *variables["messages"].data;
  if (!messages.is_array()) throw ConfigError("chat: messages: expected a list");
  for (const jinja::Json& message : messages) {
    ++number;
    if (message.is_object() && message.value("role", jinja::Json()).is_string()) continue;
    throw ConfigError(fmt::format("chat: message {}: expected an object with a role", number));
  }
  const Parsed& form = chosen(chat.is_object() && !chat.value("tools", Json()).empty());
  std::string text =
      naming(form.file, [&] { return jinja::run(*form.root, std::move(variables)); });
  return form.root->text.empty() ? text : without_marks(text, generated);
}

}  // namespace tandem
