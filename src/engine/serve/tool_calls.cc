#include "engine/serve/tool_calls.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "core/system/json.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::string_view kBlank = " \t\r\n";
constexpr std::string_view kOpen = "<tool_call>", kClose = "</tool_call>";
constexpr std::string_view kList = "[TOOL_CALLS]", kPython = "<|python_tag|>";
constexpr std::string_view kId = "[CALL_ID]", kArguments = "[ARGS]";
constexpr std::string_view kMarkers[] = {kOpen, kList, kPython};
/// Markers, and what divides a call.
constexpr std::string_view kAllMarkers[] = {kOpen, kClose, kList, kPython, kId, kArguments};

std::string_view trim(std::string_view text) {
  const size_t begin = text.find_first_not_of(kBlank);
  if (begin == text.npos) return {};
  return text.substr(begin, text.find_last_not_of(kBlank) + 1 - begin);
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

/// Values of a JSON object or list as they are written, with their keys in an object. `text`:
/// valid.
std::vector<std::pair<std::string, std::string_view>> members(std::string_view text) {
  std::vector<std::pair<std::string, std::string_view>> all;
  const bool is_object = text.starts_with('{');
  int depth = 0;
  bool in_string = false;
  size_t begin = 1;
  std::string key;
  for (size_t at = 0; at < text.size(); ++at) {
    const char c = text[at];
    if (in_string) {
      if (c == '\\') ++at;
      in_string = c != '"';
      continue;
    }
    in_string = c == '"';
    if (c == '{' || c == '[') ++depth;
    const bool is_end = (c == '}' || c == ']') && --depth == 0;
    if (c == ':' && depth == 1) {
      key = parse_json<Json>(trim(text.substr(begin, at - begin))).get<std::string>();
      begin = at + 1;
    } else if (is_end || (c == ',' && depth == 1)) {
      const std::string_view value = trim(text.substr(begin, at - begin));
      if (!value.empty() || is_object) all.emplace_back(key, value);
      begin = at + 1;
    }
  }
  return all;
}

std::optional<ToolCall> parse_call(std::string_view text) {
  if (!parse_json<Json>(text).is_object()) return {};
  ToolCall call{"", "{}"};
  for (const auto& [key, value] : members(text)) {
    const Json parsed = parse_json<Json>(value);
    if (key == "name" || (key == "function" && call.name.empty())) {
      if (parsed.is_object()) return parse_call(value);  // as OpenAI has calls
      if (!parsed.is_string()) return {};
      call.name = parsed.get<std::string>();
    } else if ((key == "arguments" || key == "parameters") && !parsed.is_null()) {
      call.arguments = parsed.is_string() ? parsed.get<std::string>() : std::string(value);
      if (!parse_json<Json>(call.arguments).is_object()) return {};
    }
  }
  if (call.name.empty()) return {};
  return call;
}

/// Bytes of a list, or of name[ARGS]{…}, that `text` begins with; 0 if it may not have ended, npos
/// if it begins with neither.
size_t call_bytes(std::string_view text) {
  constexpr std::string_view kNameCharacters =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-./:";
  const size_t first = text.find_first_not_of(kBlank);
  if (first == text.npos) return 0;
  size_t at = first;
  if (text[at] != '[') {
    at = text.find_first_not_of(kNameCharacters, at);
    if (at == text.npos) return 0;
    if (at == first) return text.npos;
    const std::string_view rest = text.substr(at);
    if (rest.starts_with(kId)) at = text.find(kArguments, at);
    if (at == text.npos || (kId.starts_with(rest) || kArguments.starts_with(rest))) return 0;
    if (text.substr(at).starts_with(kArguments)) at += kArguments.size();
    at = text.find_first_not_of(kBlank, at);
    if (at == text.npos) return 0;
    if (text[at] != '{') return text.npos;
  }
  const size_t bytes = json_bytes(text.substr(at));
  return bytes == 0 ? 0 : at + bytes;
}

/// Begin of the marker that ends a call, which strings of its object may have, too; npos if there
/// is none yet.
size_t find_close(std::string_view text) {
  const size_t begin = text.find_first_not_of(kBlank);
  bool in_string = false;
  const bool is_object = begin != text.npos && text[begin] == '{';
  for (size_t at = is_object ? begin : text.npos; at < text.size(); ++at) {
    if (!in_string && text.substr(at).starts_with(kClose)) return at;
    if (in_string && text[at] == '\\') {
      ++at;
    } else if (text[at] == '"') {
      in_string = !in_string;
    }
  }
  return is_object ? text.npos : text.find(kClose);
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

std::span<const std::string_view> tool_call_markers() {
  return kAllMarkers;
}

bool ToolCallReader::read_tagged(std::string_view body) {
  const auto call = parse_call(trim(body));
  if (call) calls_.push_back(*call);
  return call.has_value();
}

bool ToolCallReader::read_list(std::string_view body) {
  body = trim(body);
  std::vector<ToolCall> calls;
  if (body.starts_with('[')) {
    if (!parse_json<Json>(body).is_array()) return false;
    for (const auto& [key, value] : members(body)) {
      const auto call = parse_call(value);
      if (!call) return false;
      calls.push_back(*call);
    }
  } else {
    const size_t begin = body.find('{');
    const std::string_view arguments = body.substr(std::min(begin, body.size()));
    if (!parse_json<Json>(arguments).is_object()) return false;
    const std::string_view name = body.substr(0, std::min(begin, body.find('[')));
    calls.push_back({std::string(trim(name)), std::string(arguments)});
  }
  calls_.insert(calls_.end(), calls.begin(), calls.end());
  return !calls.empty();
}

bool ToolCallReader::read_objects(std::string_view body) {
  std::vector<ToolCall> calls;
  for (body = trim(body); !body.empty();) {
    const size_t bytes = body.starts_with('{') ? json_bytes(body) : 0;
    const auto call = parse_call(body.substr(0, bytes));
    if (!call || std::ranges::find(names_, call->name) == names_.end()) return false;
    calls.push_back(*call);
    body = trim(body.substr(bytes));
    if (body.starts_with(';') || body.starts_with(',')) body = trim(body.substr(1));
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
    if (state_ == State::objects) return result;
    if (state_ == State::list) {
      const size_t bytes = call_bytes(pending_);
      if (bytes == 0) return result;
      const std::string body = pending_.substr(0, bytes == pending_.npos ? 0 : bytes);
      pending_.erase(0, body.size());
      result += end_call(read_list(body), std::string(kList) + body);
      continue;
    }
    const size_t close = find_close(pending_);
    if (close == pending_.npos) return result;
    result += end_tagged(close);
  }
}

/// Ends a call before the marker at `close`.
std::string ToolCallReader::end_tagged(size_t close) {
  const std::string body = pending_.substr(0, close);
  pending_.erase(0, close + kClose.size());
  const std::string raw = std::string(kOpen) + body + std::string(kClose);
  return end_call(read_tagged(body), raw);
}

std::string ToolCallReader::rest() {
  std::string text;
  while (state_ == State::tagged) {  // in a string that never ends: what follows the marker is read
    const size_t close = pending_.find(kClose);
    if (close == pending_.npos) break;
    text += end_tagged(close);
    text += add("");
  }
  const std::string body = std::exchange(pending_, {});
  bool is_read = false;
  switch (state_) {
    case State::text:
      return text + (after_call_ && trim(body).empty() ? "" : body);
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
  return text + end_call(is_read, marker_ + body);
}

}  // namespace tandem
