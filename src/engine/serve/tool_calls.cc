#include "engine/serve/tool_calls.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "core/json.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::string_view kBlank = " \t\r\n";
constexpr std::string_view kOpen = "<tool_call>", kClose = "</tool_call>";
constexpr std::string_view kList = "[TOOL_CALLS]", kPython = "<|python_tag|>";
constexpr std::string_view kMarkers[] = {kOpen, kList, kPython};

std::optional<ToolCall> call_of(const Json& json) {
  if (!json.is_object() || !json.contains("name") || !json["name"].is_string()) return {};
  Json arguments = Json::object();
  for (const char* name : {"arguments", "parameters"}) {
    if (json.contains(name)) arguments = json[name];
  }
  if (arguments.is_string()) arguments = parse_json<Json>(arguments.get<std::string>());
  if (!arguments.is_object()) return {};
  return ToolCall{json["name"].get<std::string>(), arguments.dump()};
}

/// Bytes of the JSON object or list that `text` begins with; 0 if it does not end.
size_t json_bytes(std::string_view text) {
  int depth = 0;
  bool in_string = false;
  for (size_t at = 0; at < text.size(); ++at) {
    const char c = text[at];
    if (in_string) {
      if (c == '\\') ++at;
      if (c == '"') in_string = false;
      continue;
    }
    if (c == '"') in_string = true;
    if (c == '{' || c == '[') ++depth;
    if ((c == '}' || c == ']') && --depth == 0) return at + 1;
  }
  return 0;
}

std::string_view trim(std::string_view text) {
  const size_t begin = text.find_first_not_of(kBlank);
  if (begin == text.npos) return {};
  return text.substr(begin, text.find_last_not_of(kBlank) + 1 - begin);
}

/// Bytes at the end of `text` that may begin a marker.
size_t open_marker_bytes(std::string_view text) {
  size_t longest = 0;
  for (const std::string_view marker : kMarkers) {
    for (size_t n = std::min(text.size(), marker.size() - 1); n > longest; --n) {
      if (text.ends_with(marker.substr(0, n))) longest = n;
    }
  }
  return longest;
}

}  // namespace

bool ToolCallReader::read_tagged(std::string_view body) {
  const auto call = call_of(parse_json<Json>(trim(body)));
  if (call) calls_.push_back(*call);
  return call.has_value();
}

bool ToolCallReader::read_list(std::string_view body) {
  const Json list = parse_json<Json>(trim(body));
  if (!list.is_array() || list.empty()) return false;
  std::vector<ToolCall> calls;
  for (const Json& item : list) {
    const auto call = call_of(item);
    if (!call) return false;
    calls.push_back(*call);
  }
  calls_.insert(calls_.end(), calls.begin(), calls.end());
  return true;
}

bool ToolCallReader::read_objects(std::string_view body) {
  std::vector<ToolCall> calls;
  for (body = trim(body); !body.empty();) {
    const size_t bytes = body.starts_with('{') ? json_bytes(body) : 0;
    const auto call = call_of(parse_json<Json>(body.substr(0, bytes)));
    if (!call || std::ranges::find(names_, call->name) == names_.end()) return false;
    calls.push_back(*call);
    body = trim(body.substr(bytes));
    if (body.starts_with(';')) body = trim(body.substr(1));
  }
  calls_.insert(calls_.end(), calls.begin(), calls.end());
  return !calls.empty();
}

/// Back to text after a call, or after `raw`, which is none.
std::string ToolCallReader::end_call(bool is_read, std::string_view raw) {
  state_ = State::text;
  after_call_ = is_read;
  return is_read ? std::string() : std::string(raw);
}

std::string ToolCallReader::add_text() {
  const size_t first = pending_.find_first_not_of(kBlank);
  if (is_begin_ || after_call_) {
    if (first == pending_.npos) return "";
    if (is_begin_ && pending_[first] == '{') {
      state_ = State::objects;
      marker_.clear();
      return "";
    }
    if (after_call_) pending_.erase(0, first);
  }
  size_t begin = pending_.npos;
  for (const std::string_view marker : kMarkers) {
    const size_t found = pending_.find(marker);
    if (found >= begin) continue;
    begin = found;
    marker_ = marker;
    state_ = marker == kOpen ? State::tagged : marker == kList ? State::list : State::objects;
  }
  const bool is_call = begin != pending_.npos;
  const size_t end = is_call ? begin : pending_.size() - open_marker_bytes(pending_);
  std::string text = pending_.substr(0, end);
  pending_.erase(0, is_call ? end + marker_.size() : end);
  const bool is_blank = text.find_first_not_of(kBlank) == text.npos;
  if (is_begin_ && is_blank && !is_call) {
    pending_.insert(0, text);
    return "";
  }
  if (is_begin_ && is_blank) text.clear();
  is_begin_ = false;
  if (!text.empty()) after_call_ = false;
  return text;
}

std::string ToolCallReader::add(std::string_view text) {
  pending_ += text;
  std::string result;
  while (true) {
    if (state_ == State::text) {
      result += add_text();
      if (state_ == State::text) return result;
      continue;
    }
    const size_t close = state_ == State::tagged ? pending_.find(kClose) : pending_.npos;
    if (close == pending_.npos) return result;
    const std::string body = pending_.substr(0, close);
    pending_.erase(0, close + kClose.size());
    const std::string raw = std::string(kOpen) + body + std::string(kClose);
    result += end_call(read_tagged(body), raw);
  }
}

std::string ToolCallReader::rest() {
  const std::string body = std::exchange(pending_, {});
  bool is_read = false;
  switch (state_) {
    case State::text:
      return after_call_ && trim(body).empty() ? "" : body;
    case State::tagged:
      is_read = read_tagged(body);
      break;
    case State::list:
      is_read = read_list(body);
      break;
    case State::objects:
      is_read = read_objects(body);
      break;
  }
  return end_call(is_read, marker_ + body);
}

}  // namespace tandem
