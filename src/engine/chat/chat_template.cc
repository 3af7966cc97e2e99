#include "engine/chat/chat_template.h"

#include <fmt/format.h>

#include <utility>

#include "core/files.h"
#include "core/json.h"
#include "engine/chat/jinja_run.h"
#include "tandem/error.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kMaxTemplateBytes = size_t{1} << 20;

/// Text of a token: a string, or the content of an object.
std::optional<std::string> token_text(const Json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (!value.is_object() || !value.contains("content") || !value["content"].is_string()) return {};
  return value["content"].get<std::string>();
}

/// Template in tokenizer_config.json.
std::optional<std::string> named_template(const Json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (!value.is_array()) return {};
  for (const Json& each : value) {
    if (each.is_object() && each.value("name", Json()) == "default" &&
        each.value("template", Json()).is_string()) {
      return each["template"].get<std::string>();
    }
  }
  return {};
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

ChatTemplate::ChatTemplate(const std::string& source, std::map<std::string, std::string> tokens)
    : root_(jinja::parse(checked_text(source))), tokens_(std::move(tokens)) {}

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
  std::string text = jinja::run(*root_, std::move(variables));
  return root_->text.empty() ? text : without_marks(text, generated);
}

ChatTemplate read_chat_template(const std::string& folder) {
  const std::string config = folder + "/tokenizer_config.json";
  std::string file = folder + "/chat_template.jinja";
  std::optional<std::string> source;
  if (path_exists(file)) source = read_small_file(file, kMaxTemplateBytes);
  std::map<std::string, std::string> tokens;
  if (path_exists(config)) {
    const Json root = parse_json<Json>(read_file(config));
    if (!root.is_object()) throw ConfigError(config + ": expected a JSON object");
    for (const auto& [key, value] : root.items()) {
      if (!key.ends_with("_token")) continue;
      if (const auto text = token_text(value)) tokens[key] = *text;
    }
    if (!source && (source = named_template(root.value("chat_template", Json())))) {
      file = config + ": chat_template";
    }
  }
  if (!source) {
    throw ConfigError(
        fmt::format("{}: no chat template: expected chat_template.jinja, or chat_template in "
                    "tokenizer_config.json",
                    folder));
  }
  if (source->size() > kMaxTemplateBytes) throw ConfigError(file + ": more than 1 MiB");
  try {
    return {*source, std::move(tokens)};
  } catch (const ConfigError& error) {
    throw ConfigError(fmt::format("{}: {}", file, error.what()));
  }
}

}  // namespace tandem
