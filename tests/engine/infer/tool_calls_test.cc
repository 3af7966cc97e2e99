// Calls of functions in texts, however they are cut, and in the answers to chats.
#include "engine/serve/tool_calls.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "engine/serve/completion_answer.h"
#include "tandem/random.h"

namespace tandem {
namespace {

using nlohmann::json;

struct Case {
  const char* text;
  const char* content;
  std::vector<std::pair<std::string, std::string>> calls;  ///< names and arguments
};

const Case kCases[] = {
    {"Hello <tool {x} <tool_calls> [TOOL]", "Hello <tool {x} <tool_calls> [TOOL]", {}},
    {"", "", {}},
    {" \n", " \n", {}},
    // Hermes and Qwen
    {"<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 1, \"b\": \"}</x>\"}}\n</tool_call>",
     "",
     {{"add", R"({"a": 1, "b": "}</x>"})"}}},
    {"Let me see.\n<tool_call>{\"name\": \"f\"}</tool_call>\n<tool_call>{\"name\": \"g\", "
     "\"arguments\": \"{\\\"x\\\": [1]}\"}</tool_call>\n done",
     "Let me see.\ndone",
     {{"f", "{}"}, {"g", R"({"x": [1]})"}}},
    {"<tool_call>{\"name\": \"f\", \"arguments\": {}}", "", {{"f", "{}"}}},
    {"a<tool_call>{\"name\": 3}</tool_call>b", "a<tool_call>{\"name\": 3}</tool_call>b", {}},
    {"<tool_call>{\"name\"", "<tool_call>{\"name\"", {}},
    {"<tool_call>{\"name\": \"f\", \"arguments\": {\"u\": \"\\\"</tool_call>\"}}</tool_call>\n"
     "<tool_call>{\"name\": \"add\"}</tool_call>",
     "",
     {{"f", R"({"u": "\"</tool_call>"})"}, {"add", "{}"}}},
    {"<tool_call>{\"name\": \"f</tool_call> a <tool_call>{\"name\": \"f\"}</tool_call>",
     "<tool_call>{\"name\": \"f</tool_call> a ",
     {{"f", "{}"}}},
    {"<tool_call>{\"a\": \"</tool_call> b", "<tool_call>{\"a\": \"</tool_call> b", {}},
    {"<tool_call>f</tool_call>", "<tool_call>f</tool_call>", {}},
    // Mistral
    {"[TOOL_CALLS] [{\"name\": \"add\", \"arguments\": {\"a\": 1}}, {\"name\": \"f\"}]",
     "",
     {{"add", R"({"a": 1})"}, {"f", "{}"}}},
    {"[TOOL_CALLS]add[ARGS]{\"a\": 12345678901234567890123, \"b\": 1.0}",
     "",
     {{"add", R"({"a": 12345678901234567890123, "b": 1.0})"}}},
    {"Sum: [TOOL_CALLS]add[CALL_ID]a1b2[ARGS]{\"a\": 1}[TOOL_CALLS]f[ARGS]{}",
     "Sum: ",
     {{"add", R"({"a": 1})"}, {"f", "{}"}}},
    {"[TOOL_CALLS]f{\"a\": \"[ARGS]\"} ", "", {{"f", R"({"a": "[ARGS]"})"}}},
    {"[TOOL_CALLS]f[ARGS]{} and more", "and more", {{"f", "{}"}}},
    {"[TOOL_CALLS]add[ARGS]{\"a\"", "[TOOL_CALLS]add[ARGS]{\"a\"", {}},
    {"[TOOL_CALLS]add[ARGS]{a}", "[TOOL_CALLS]add[ARGS]{a}", {}},
    {"[TOOL_CALLS] no call", "[TOOL_CALLS] no call", {}},
    {"[TOOL_CALLS] [{\"name\": \"add\"}, 3]", "[TOOL_CALLS] [{\"name\": \"add\"}, 3]", {}},
    // Llama 3
    {"{\"name\": \"add\", \"parameters\": {\"a\": \"\\\"{\"}}", "", {{"add", R"({"a": "\"{"})"}}},
    {"\n{\"name\": \"add\", \"parameters\": {}}; {\"name\": \"f\", \"parameters\": {}}",
     "",
     {{"add", "{}"}, {"f", "{}"}}},
    {"<|python_tag|>{\"name\": \"f\", \"parameters\": {\"x\": null}}",
     "",
     {{"f", R"({"x": null})"}}},
    {"<|python_tag|>{\"type\": \"function\", \"name\": \"f\", \"parameters\": {}}, "
     "{\"type\": \"function\", \"function\": {\"name\": \"add\", \"arguments\": \"{}\"}}",
     "",
     {{"f", "{}"}, {"add", "{}"}}},
    {"<|python_tag|>f.call(1)", "<|python_tag|>f.call(1)", {}},
    {"{\"name\": \"unknown\", \"parameters\": {}}",
     "{\"name\": \"unknown\", \"parameters\": {}}",
     {}},
    {"{\"name\": \"add\", \"parameters\": {}} is JSON",
     "{\"name\": \"add\", \"parameters\": {}} is JSON",
     {}},
    {"x {\"name\": \"add\", \"parameters\": {}}", "x {\"name\": \"add\", \"parameters\": {}}", {}},
};

TEST(ToolCalls, AreFoundHoweverTheTextIsCut) {
  const std::vector<std::string> names{"add", "f"};
  for (const Case& example : kCases) {
    const std::string text = example.text;
    for (uint64_t seed = 0; seed < 50; ++seed) {
      ToolCallReader reader(names);
      std::string content;
      std::vector<std::pair<std::string, std::string>> calls;
      const auto take = [&] {
        for (ToolCall& call : reader.take()) calls.emplace_back(call.name, call.arguments);
      };
      for (size_t at = 0; at < text.size();) {
        const size_t bytes = seed == 0 ? text.size() : 1 + philox(seed, 5, at)[0] % (seed % 9 + 1);
        content += reader.add(std::string_view(text).substr(at, bytes));
        take();
        at += bytes;
      }
      content += reader.rest();
      take();
      EXPECT_EQ(content, example.content) << text;
      EXPECT_EQ(calls, example.calls) << text;
    }
  }
}

TEST(ToolCalls, TextIsNotHeldBackForLong) {
  const std::vector<std::string> names{"f"};
  ToolCallReader reader(names);
  EXPECT_EQ(reader.add("a <to"), "a ");
  EXPECT_EQ(reader.add("p"), "<top");
  EXPECT_EQ(reader.add("<tool_call>{\"name\": \"f\"}</tool_call>"), "");
  EXPECT_EQ(reader.take().size(), 1u);
}

/// Answers to a chat whose text is `text`, in tokens of `bytes` bytes.
struct Answers {
  json whole;
  std::vector<json> events;
};

Answers answer(const std::string& text, size_t bytes, Finish finish) {
  Answers answers;
  ServedModel model;
  model.name = "m";
  for (const bool streams : {false, true}) {
    CompletionRequest request;
    request.is_chat = true;
    request.streams = streams;
    request.choices.resize(1);
    request.tools = {"add"};
    CompletionAnswer given(model, request, "1");
    for (size_t at = 0; at < text.size(); at += bytes) {
      TokenEvent event;
      event.text = text.substr(at, bytes);
      if (at + bytes >= text.size()) event.finish = finish;
      const std::string sent = given.add(0, event);
      if (!sent.empty()) answers.events.push_back(json::parse(sent.substr(6)));
    }
    EXPECT_TRUE(given.is_done());
    if (!streams) answers.whole = json::parse(given.whole());
  }
  return answers;
}

TEST(ToolCalls, AreInAnswersAndStreams) {
  const std::string text =
      "Sum:\n<tool_call>{\"name\": \"add\", \"arguments\": {\"a\": 1}}</tool_call>"
      "<tool_call>{\"name\": \"add\", \"arguments\": {}}</tool_call>";
  const Answers answers = answer(text, 7, Finish::end_token);
  const json choice = answers.whole["choices"][0];
  EXPECT_EQ(choice["finish_reason"], "tool_calls");
  EXPECT_EQ(choice["message"]["content"], "Sum:\n");
  const json& calls = choice["message"]["tool_calls"];
  ASSERT_EQ(calls.size(), 2u);
  EXPECT_EQ(calls[0]["type"], "function");
  EXPECT_EQ(calls[0]["function"], (json{{"name", "add"}, {"arguments", R"({"a": 1})"}}));
  EXPECT_NE(calls[0]["id"], calls[1]["id"]);
  EXPECT_EQ(calls[0]["id"].get<std::string>().size(), 9u);
  std::string content;
  json streamed = json::array();
  for (const json& event : answers.events) {
    const json& delta = event["choices"][0]["delta"];
    content += delta.value("content", "");
    for (json call : delta.value("tool_calls", json::array())) {
      EXPECT_EQ(call["index"], streamed.size());
      call.erase("index");
      streamed.push_back(call);
    }
  }
  EXPECT_EQ(content, "Sum:\n");
  EXPECT_EQ(streamed, calls);
  EXPECT_EQ(answers.events.back()["choices"][0]["finish_reason"], "tool_calls");
}

TEST(ToolCalls, CutTextHasItsReason) {
  const json choice = answer("<tool_call>{\"name\"", 5, Finish::max_tokens).whole["choices"][0];
  EXPECT_EQ(choice["finish_reason"], "length");
  EXPECT_EQ(choice["message"]["content"], "<tool_call>{\"name\"");
  EXPECT_FALSE(choice["message"].contains("tool_calls"));
  const json only = answer("{\"name\": \"add\", \"parameters\": {}}", 3, Finish::end_token).whole;
  EXPECT_EQ(only["choices"][0]["message"]["content"], nullptr);
}

}  // namespace
}  // namespace tandem
