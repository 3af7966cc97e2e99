// Texts of values: Python's and JSON.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "engine/chat/jinja/jinja_value.h"

namespace tandem::jinja {
namespace {

std::string float_text(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  std::string text = fmt::format("{}", value);  // the shortest that is read back
  if (text.find_first_of(".en") == std::string::npos) text += ".0";
  return text;
}

std::string quoted(const std::string& text) {
  const bool has_single = text.find('\'') != std::string::npos;
  const char quote = has_single && text.find('"') == std::string::npos ? '"' : '\'';
  std::string result(1, quote);
  for (size_t at = 0; at < text.size(); ++at) {
    const char c = text[at];
    if (uint8_t(c) > 127 && leading_space(text.substr(at, 3)) > 0) {
      const std::string json = Json(characters(text.substr(at, 3))[0]).dump(-1, ' ', true);
      const bool is_short = json.starts_with("\"\\u00");  // Python writes \x85
      result += is_short ? "\\x" + json.substr(5, 2) : json.substr(1, json.size() - 2);
      at += characters(text.substr(at, 3))[0].size() - 1;
    } else if (c == '\n') {
      result += "\\n";
    } else if (c == '\r') {
      result += "\\r";
    } else if (c == '\t') {
      result += "\\t";
    } else if (c == quote || c == '\\') {
      result += std::string("\\") + c;
    } else if (uint8_t(c) < 32 || c == 127) {
      result += fmt::format("\\x{:02x}", uint8_t(c));
    } else {
      result += c;
    }
  }
  return result + quote;
}

std::string digits(const Json& json) {
  const std::vector<uint8_t>& bytes = json.get_binary();
  return {bytes.begin(), bytes.end()};
}

std::string list_text(const Json& all) {
  std::string text;
  for (size_t i = 0; i < all.size(); ++i) text += (i > 0 ? ", " : "") + python_text(all[i]);
  using enum SequenceKind;
  switch (kind_of(all)) {
    case tuple:
    case group:
      return "(" + text + (all.size() == 1 ? ",)" : ")");
    case items:
      return "dict_items([" + text + "])";
    case keys:
      return "dict_keys([" + text + "])";
    case values:
      return "dict_values([" + text + "])";
    case SequenceKind::list:
      break;
  }
  return "[" + text + "]";
}

class JsonWriter {
 public:
  explicit JsonWriter(const JsonStyle& style) : style_(style) {}

  void write(const Json& json) {
    if (json.is_array()) {
      using enum SequenceKind;
      const SequenceKind kind = kind_of(json);
      if (kind == items || kind == keys || kind == values) fail("tojson: expected a list of these");
      join('[', ']', json.size(), [&](size_t i) { write(json[i]); });
    } else if (json.is_object()) {
      std::vector<std::pair<const std::string*, const Json*>> members;
      for (const auto& each : json.get_ref<const Json::object_t&>()) {
        members.emplace_back(&each.first, &each.second);
      }
      if (style_.sorts_keys) {
        std::ranges::sort(members, {}, [](const auto& each) { return *each.first; });
      }
      join('{', '}', members.size(), [&](size_t i) {
        text_ += string(*members[i].first) + style_.key_separator;
        write(*members[i].second);
      });
    } else if (json.is_string()) {
      text_ += string(json);
    } else if (json.is_number_float()) {
      const double number = json.get<double>();
      text_ += std::isnan(number)   ? "NaN"
               : std::isinf(number) ? (number > 0 ? "Infinity" : "-Infinity")
                                    : float_text(number);
    } else {
      text_ += json.is_binary() ? digits(json) : json.dump();
    }
    check_text(text_.size());
  }
  std::string take() { return std::move(text_); }

 private:
  std::string string(const Json& json) const {
    return json.dump(-1, ' ', style_.escapes, Json::error_handler_t::replace);
  }
  void begin_line() {
    if (!style_.indent) return;
    text_ += '\n';
    for (int i = 0; i < level_; ++i) text_ += *style_.indent;
  }
  template <typename Write>
  void join(char open, char close, size_t count, const Write& write_element) {
    text_ += open;
    ++level_;
    for (size_t i = 0; i < count; ++i) {
      if (i > 0) text_ += style_.item_separator;
      begin_line();
      write_element(i);
    }
    --level_;
    if (count > 0) begin_line();
    text_ += close;
  }

  const JsonStyle& style_;
  std::string text_;
  int level_ = 0;
};

}  // namespace

std::string python_text(const Json& json) {
  if (json.is_string()) return quoted(json.get_ref<const std::string&>());
  if (json.is_null()) return "None";
  if (json.is_boolean()) return json.get<bool>() ? "True" : "False";
  if (json.is_number_float()) return float_text(json.get<double>());
  if (json.is_array()) return list_text(json);
  if (json.is_object()) {
    std::string text = "{";
    for (const auto& [key, value] : json.items()) {
      text += (text.size() > 1 ? ", " : "") + quoted(key) + ": " + python_text(value);
    }
    return text + "}";
  }
  return json.is_binary() ? digits(json) : json.dump();
}

std::string to_json_text(const Json& json, const JsonStyle& style) {
  JsonWriter writer(style);
  writer.write(json);
  return writer.take();
}

}  // namespace tandem::jinja
