// Calls of functions ("tools") in a model's text, in the forms of three families:
//   Hermes and Qwen:  <tool_call>{"name": …, "arguments": {…}}</tool_call>, several in a row
//   Mistral:          [TOOL_CALLS][{"name": …, "arguments": {…}}, …], or [TOOL_CALLS]name[ARGS]{…}
//                     for each call
//   Llama 3:          {"name": …, "parameters": {…}} as the whole text, after <|python_tag|> or
//                     without, several with ; between them
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tandem {

struct ToolCall {
  std::string name;
  std::string arguments;  ///< a JSON object, as the model has written it
};

/// Texts that begin, divide and end calls; tokens of models with these forms.
std::span<const std::string_view> tool_call_markers();

/// Reads a text as it is written. What looks like a call and is none remains text.
class ToolCallReader {
 public:
  /// `names`: of the functions; only their calls are found without a marker before them. They must
  /// outlive this.
  explicit ToolCallReader(std::span<const std::string> names) : names_(names) {}

  /// Adds text; returns what is certain to be in no call.
  std::string add(std::string_view text);
  /// Text that is left at the end.
  std::string rest();
  /// Complete calls since the last time.
  std::vector<ToolCall> take() { return std::exchange(calls_, {}); }

 private:
  enum class State : uint8_t { text, tagged, list, objects };
  std::string add_text();
  std::string end_tagged(size_t close);
  std::string end_call(bool is_read, std::string_view raw);
  bool read_tagged(std::string_view body);
  bool read_list(std::string_view body);
  bool read_objects(std::string_view body);

  std::span<const std::string> names_;
  State state_ = State::text;
  std::string marker_;  ///< that began a call
  std::string pending_;
  bool is_begin_ = true;     ///< only white space was seen
  bool after_call_ = false;  ///< white space is dropped
  std::vector<ToolCall> calls_;
};

}  // namespace tandem
