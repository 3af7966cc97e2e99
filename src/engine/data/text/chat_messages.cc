#include "engine/data/text/chat_messages.h"

#include <fmt/format.h>

#include <string>
#include <utility>

#include "core/system/json.h"
#include "core/system/printable.h"
#include "tandem/error.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kForms =
    "expected {\"messages\": [...]}, {\"conversations\": [...]} or {\"instruction\": \"...\", "
    "\"output\": \"...\"}";
constexpr const char* kRoles = "expected system, developer, user (human), assistant (gpt) or tool";

struct RoleName {
  std::string_view name, role;
};
constexpr RoleName kRoleNames[] = {
    {"system", "system"},       {"developer", "developer"}, {"user", "user"}, {"human", "user"},
    {"assistant", "assistant"}, {"gpt", "assistant"},       {"tool", "tool"}};

std::string role_of(const Json& name, const std::string& key) {
  for (const RoleName& each : kRoleNames) {
    if (name.is_string() && name.get_ref<const std::string&>() == each.name) {
      return std::string(each.role);
    }
  }
  throw ConfigError(fmt::format("{} = {}: {}", key, printable(dump_json(name), 60), kRoles));
}

/// Whether templates take the content: text, a list of texts, or nothing next to calls.
bool is_content(const Json& message) {
  const Json content = message.value("content", Json());
  if (content.is_string()) return true;
  if (content.is_null()) return !message.value("tool_calls", Json()).empty();
  if (!content.is_array()) return false;
  for (const Json& entry : content) {
    const bool is_text = entry.is_object() && entry.value("type", Json()) == "text" &&
                         entry.value("text", Json()).is_string();
    if (!is_text) return false;
  }
  return !content.empty();
}

Json parse_message(const Json& given) {
  if (!given.is_object()) throw ConfigError("expected an object with role and content");
  const bool is_turn = !given.contains("role") && given.contains("from");
  Json message = given;
  if (is_turn) message = {{"content", given.value("value", Json())}};
  const char* const key = is_turn ? "from" : "role";
  message["role"] = role_of(given.value(key, Json()), key);
  if (is_content(message)) return message;
  throw ConfigError(fmt::format("{} = {}: expected text", is_turn ? "value" : "content",
                                printable(dump_json(message.value("content", Json())), 60)));
}

Json parse_messages(const Json& given, const char* key) {
  if (!given.is_array() || given.empty()) {
    throw ConfigError(
        fmt::format("{} = {}: expected a list of messages", key, printable(dump_json(given), 60)));
  }
  Json messages = Json::array();
  for (const Json& each : given) {
    try {
      messages.push_back(parse_message(each));
    } catch (const ConfigError& error) {
      throw ConfigError(fmt::format("message {}: {}", messages.size() + 1, error.what()));
    }
  }
  return messages;
}

/// Text of the key, or "" without it.
std::string text_of(const Json& object, const char* key) {
  const Json value = object.value(key, Json());
  if (value.is_null()) return "";
  if (value.is_string()) return value.get<std::string>();
  throw ConfigError(fmt::format("{} = {}: expected text", key, printable(dump_json(value), 60)));
}

Json parse_instruction(const Json& object) {
  std::string question = text_of(object, "instruction");
  const std::string input = text_of(object, "input"), answer = text_of(object, "output");
  if (question.empty()) throw ConfigError("instruction is empty: expected text");
  if (!object.contains("output")) throw ConfigError("no output: expected the answer");
  if (!input.empty()) question += "\n\n" + input;
  return {{{"role", "user"}, {"content", question}}, {{"role", "assistant"}, {"content", answer}}};
}

/// First of the keys that name a form, or nullptr.
const char* form_of(const Json& object) {
  for (const char* key : {"messages", "conversations", "instruction"}) {
    if (object.contains(key)) return key;
  }
  return nullptr;
}

}  // namespace

Json parse_chat(std::string_view line) {
  const Json object = parse_json<Json>(line);
  if (!object.is_object()) throw ConfigError(fmt::format("no JSON object: {}", kForms));
  const char* const form = form_of(object);
  if (!form) throw ConfigError(fmt::format("none of the keys of a chat: {}", kForms));
  const bool has_turns = form != std::string_view("instruction");
  Json messages = has_turns ? parse_messages(object[form], form) : parse_instruction(object);
  const bool takes_system = form != std::string_view("messages");
  if (const std::string system = takes_system ? text_of(object, "system") : ""; !system.empty()) {
    messages.insert(messages.begin(), Json{{"role", "system"}, {"content", system}});
  }
  Json chat{{"messages", std::move(messages)}};
  if (const Json tools = object.value("tools", Json()); tools.is_array()) chat["tools"] = tools;
  return chat;
}

bool is_chat_line(std::string_view line) {
  const Json object = parse_json<Json>(line);
  return object.is_object() && !object.contains("text") && form_of(object);
}

}  // namespace tandem
