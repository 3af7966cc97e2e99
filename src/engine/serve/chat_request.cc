#include "engine/serve/chat_request.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "core/system/json.h"
#include "core/system/printable.h"
#include "engine/serve/request_fields.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

/// Variables of templates that are fields of requests.
constexpr std::string_view kRequestVariables[] = {"messages",
                                                  "tools",
                                                  "chat_template",
                                                  "tokenize",
                                                  "add_generation_prompt",
                                                  "continue_final_message"};

bool has_string(const Json& object, std::string_view name) {
  return object.is_object() && has(object, name) && object.find(name)->is_string();
}

/// A block of a message's content as {"type": "text", "text": …}.
Json text_block(const Json& block) {
  if (block.is_string()) return {{"type", "text"}, {"text", block}};
  const std::string type = has_string(block, "type") ? block["type"].get<std::string>() : "";
  if (type == "refusal" && has_string(block, "refusal")) {
    return {{"type", "text"}, {"text", block["refusal"]}};
  }
  const bool is_text = type == "text" || type == "input_text" || type == "output_text";
  if (!is_text || !has_string(block, "text")) reject("messages", block, "content of type text");
  Json text = block;
  text["type"] = "text";
  return text;
}

void take_content(ChatTemplate::ContentForm form, Json& message) {
  Json& content = message["content"];
  if (content.is_string() && form == ChatTemplate::ContentForm::list) {
    content = Json::array({text_block(content)});
  }
  if (!content.is_array()) {
    if (content.is_string() || content.is_null()) return;
    reject("messages", message, "content that is a text or a list of blocks");
  }
  Json blocks = Json::array();
  for (const Json& block : content) blocks.push_back(text_block(block));
  if (form != ChatTemplate::ContentForm::text) {
    content = std::move(blocks);
    return;
  }
  std::string text;
  for (size_t i = 0; i < blocks.size(); ++i) {
    text += (i > 0 ? "\n" : "") + blocks[i]["text"].get_ref<const std::string&>();
  }
  content = text;
}

/// Arguments of calls in earlier messages, JSON in a text, as the objects that templates expect.
void take_calls(Json& message) {
  if (has(message, "function_call") && !has(message, "tool_calls")) {
    message["tool_calls"] =
        Json::array({{{"type", "function"}, {"function", message["function_call"]}}});
  }
  message.erase("function_call");
  if (!has(message, "tool_calls")) return;
  Json& calls = message["tool_calls"];
  if (!calls.is_array()) reject("messages", message, "a list of tool_calls");
  for (Json& call : calls) {
    if (!call.is_object() || !has(call, "function") || !call["function"].is_object()) {
      reject("messages", call, "tool_calls with a function");
    }
    Json& arguments = call["function"]["arguments"];
    if (arguments.is_null() || arguments == "") arguments = Json::object();
    if (!arguments.is_string()) continue;
    Json parsed = parse_json_exactly(arguments.get<std::string>());
    if (!parsed.is_object()) reject("messages", call, "arguments that are a JSON object");
    arguments = std::move(parsed);
  }
  if (calls.empty()) message.erase("tool_calls");
}

/// The message without fields that are null; content is there.
Json take_message(ChatTemplate::ContentForm form, const Json& given, bool has_functions) {
  if (!has_string(given, "role")) reject("messages", given, "objects with role and content");
  Json message = Json::object();
  using Pairs = std::vector<Json::object_t::value_type>;  // without looking for each key
  auto& members = static_cast<Pairs&>(message.get_ref<Json::object_t&>());
  for (const auto& [name, value] : given.items()) {
    if (!value.is_null()) members.emplace_back(name, value);
  }
  if (!has(message, "content")) message["content"] = nullptr;
  if (has_functions && message["role"] == "function") message["role"] = "tool";
  take_content(form, message);
  take_calls(message);
  return message;
}

void take_variables(const Json& root, Json& chat) {
  for (const char* name : {"documents", "reasoning_effort"}) {
    if (has(root, name)) chat[name] = root[name];
  }
  if (!has(root, "chat_template_kwargs")) return;
  const Json& given = root["chat_template_kwargs"];
  if (!given.is_object()) reject("chat_template_kwargs", given, "an object");
  for (const auto& [name, value] : given.items()) {
    if (std::ranges::find(kRequestVariables, name) != std::end(kRequestVariables)) {
      reject("chat_template_kwargs", given, fmt::format("no {}", name));
    }
    chat[name] = value;
  }
}

/// The text up to the end of the last message's content.
std::string cut_after(const std::string& text, const Json& message) {
  const Json* content = &message["content"];
  if (content->is_array() && !content->empty()) content = &content->back()["text"];
  const std::string last = content->is_string() ? content->get<std::string>() : "";
  constexpr std::string_view kBlank = " \t\n\r\v\f";
  const size_t begin = std::min(last.find_first_not_of(kBlank), last.size());
  const std::string stripped = last.substr(begin, last.find_last_not_of(kBlank) + 1 - begin);
  const size_t found = text.rfind(stripped);
  if (stripped.empty() || found == text.npos) {
    reject("continue_final_message", true,
           "a last message whose content is in the template's text");
  }
  const bool is_whole = begin == 0 && text.compare(found, last.size(), last) == 0;
  return text.substr(0, found + (is_whole ? last : stripped).size());
}

void add_tool(const Json& tool, const char* field, ChatTools& tools) {
  const bool is_function = tool.is_object() && has(tool, "type") && tool["type"] == "function" &&
                           has(tool, "function") && has_string(tool["function"], "name");
  if (!is_function) reject(field, tool, "type function, and a function with a name");
  tools.names.push_back(tool["function"]["name"].get<std::string>());
  tools.list.push_back(tool);
}

/// Whether functions may be called.
bool takes_calls(const Json& root, const char* field) {
  if (!has(root, field)) return true;
  const Json& value = root[field];
  if (value != "auto" && value != "none") {
    reject(field, value, R"("auto" or "none" (nothing else is supported))");
  }
  return value == "auto";
}

}  // namespace

ChatTools parse_tools(const Json& root) {
  ChatTools tools{.list = Json::array()};
  tools.are_functions = has(root, "functions") && !root["functions"].empty();
  if (tools.are_functions && has(root, "tools")) {
    throw ApiError(400, "functions: expected none next to tools", "functions");
  }
  const char* const field = tools.are_functions ? "functions" : "tools";
  const bool are_called = takes_calls(root, "tool_choice") && takes_calls(root, "function_call");
  if (has(root, field)) {
    const Json& list = root[field];
    if (!list.is_array()) reject(field, list, "a list of functions");
    for (const Json& each : list) {
      add_tool(tools.are_functions ? Json{{"type", "function"}, {"function", each}} : each, field,
               tools);
    }
  }
  if (tools.names.empty() || !are_called) return {.are_functions = tools.are_functions};
  return tools;
}

std::string render_chat(const ChatTemplate& form, const Json& root, const ChatTools& tools) {
  if (!has(root, "messages") || !root["messages"].is_array() || root["messages"].empty()) {
    throw ApiError(400, "messages: expected a list of messages", "messages");
  }
  Json messages = Json::array();
  const auto content = form.content_form(!tools.list.empty());
  for (const Json& message : root["messages"]) {
    messages.push_back(take_message(content, message, tools.are_functions));
  }
  const Json last = messages.back();
  bool continues = false;
  take(root, "continue_final_message", continues);
  bool begins_answer = !continues;
  take(root, "add_generation_prompt", begins_answer);
  if (continues && begins_answer) {
    reject("continue_final_message", true, "false, or add_generation_prompt = false");
  }
  Json chat{{"messages", std::move(messages)}};
  if (!tools.list.is_null()) chat["tools"] = tools.list;
  chat["add_generation_prompt"] = begins_answer;
  take_variables(root, chat);
  std::string text = form.render(chat);
  return continues ? cut_after(text, last) : text;
}

}  // namespace tandem
