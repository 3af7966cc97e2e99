#include "engine/chat/jinja/jinja_value.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace tandem::jinja {
namespace {

size_t sequence_bytes(char first) {
  const auto byte = uint8_t(first);
  return byte < 0x80 ? 1 : byte < 0xe0 ? 2 : byte < 0xf0 ? 3 : 4;
}

bool is_space(std::string_view character) {
  static const std::vector<std::string> kWide = {"\u0085", "\u00a0", "\u1680", "\u2000", "\u2001",
                                                 "\u2002", "\u2003", "\u2004", "\u2005", "\u2006",
                                                 "\u2007", "\u2008", "\u2009", "\u200a", "\u2028",
                                                 "\u2029", "\u202f", "\u205f", "\u3000"};
  if (character.size() > 1) return std::ranges::find(kWide, character) != kWide.end();
  const char c = character[0];
  return c == ' ' || (c >= '\t' && c <= '\r') || (c >= 0x1c && c <= 0x1f);
}

}  // namespace

void fail(const std::string& what) {
  throw ConfigError(what);
}

void check_text(size_t bytes) {
  if (bytes > kMaxText) fail(fmt::format("more than {} MiB of text", kMaxText >> 20));
}

const Json& Value::json(std::string_view what) const {
  if (!data) fail(fmt::format("{} is undefined", what));
  return *data;
}

const std::string& Value::string(std::string_view what) const {
  if (!is_string()) fail(fmt::format("{}: expected a string", what));
  return data->get_ref<const std::string&>();
}

int64_t Value::integer(std::string_view what) const {
  if (is_bool()) return data->get<bool>();
  if (!is_int()) fail(fmt::format("{}: expected an integer", what));
  return data->get<int64_t>();
}

Json make_sequence(Json array, SequenceKind kind) {
  array.get_ref<Json::array_t&>().kind = kind;
  return array;
}

SequenceKind kind_of(const Json& array) {
  return array.get_ref<const Json::array_t&>().kind;
}

namespace {

bool is_tuple(const Json& json) {
  using enum SequenceKind;
  return json.is_array() && (kind_of(json) == tuple || kind_of(json) == group);
}

}  // namespace

bool Value::is_tuple() const {
  return data && jinja::is_tuple(*data);
}

bool is_true(const Value& value) {
  if (!value.data) return value.space || value.macro;
  const Json& json = *value.data;
  if (json.is_boolean()) return json.get<bool>();
  if (json.is_number()) return json.get<double>() != 0;
  if (json.is_binary()) return true;
  if (json.is_string()) return !json.get_ref<const std::string&>().empty();
  return !json.is_null() && !json.empty();
}

std::string to_text(const Value& value) {
  if (value.is_string()) return value.data->get_ref<const std::string&>();
  return value.data ? python_text(*value.data) : "";
}

bool equals(const Value& a, const Value& b) {
  if (!a.data || !b.data) return a.is_defined() == b.is_defined() && a.space == b.space;
  if (a.is_numeric() && b.is_numeric()) return a.number() == b.number();
  const Json &x = *a.data, &y = *b.data;
  if (!x.is_structured() || x.type() != y.type()) return x == y;
  if (x.size() != y.size() || is_tuple(x) != is_tuple(y)) return false;
  if (x.is_array()) {
    return std::ranges::equal(x, y, [&](const Json& one, const Json& other) {
      return equals({a, one}, {b, other});
    });
  }
  return std::ranges::all_of(x.items(), [&](const auto& each) {
    const auto found = y.find(each.key());
    return found != y.end() && equals({a, each.value()}, {b, *found});
  });
}

bool is_less(const Value& a, const Value& b) {
  if (a.is_numeric() && b.is_numeric()) return a.number() < b.number();
  if (a.is_string() && b.is_string()) return a.string("") < b.string("");
  if (a.is_list() && b.is_list() && a.is_tuple() == b.is_tuple()) {
    for (size_t i = 0; i < a.data->size() && i < b.data->size(); ++i) {
      const Value x(a, (*a.data)[i]), y(b, (*b.data)[i]);
      if (!equals(x, y)) return is_less(x, y);
    }
    return a.data->size() < b.data->size();
  }
  fail(fmt::format("{} < {}: expected two numbers or two strings", to_text(a), to_text(b)));
}

bool contains(const Value& all, const Value& one) {
  if (all.is_string()) return all.string("").find(one.string("in")) != std::string::npos;
  const std::vector<Value> each = elements(all);
  return std::ranges::any_of(each, [&](const Value& element) { return equals(element, one); });
}

std::vector<Value> elements(const Value& value) {
  std::vector<Value> all;
  if (!value.is_defined()) return all;
  const Json& json = value.json("loop over it");
  if (json.is_array()) {
    for (const Json& each : json) all.push_back({value, each});
  } else if (json.is_object()) {
    for (const auto& each : json.items()) all.emplace_back(Json(each.key()));
  } else if (json.is_string()) {
    for (const std::string& each : characters(value.string(""))) all.emplace_back(Json(each));
  } else {
    fail(fmt::format("{}: expected a list", to_text(value)));
  }
  return all;
}

Value element_at(const Value& value, int64_t index) {
  if (value.is_list()) {
    const auto size = int64_t(value.data->size());
    if (index < 0) index += size;
    return index < 0 || index >= size ? Value() : Value(value, (*value.data)[size_t(index)]);
  }
  const std::string_view text = value.string("index");
  if (index < 0) {
    int64_t size = 0;
    for (size_t at = 0; at < text.size(); at += sequence_bytes(text[at])) ++size;
    index += size;
  }
  size_t at = 0;
  for (; index > 0 && at < text.size(); --index) at += sequence_bytes(text[at]);
  if (index != 0 || at >= text.size()) return {};
  return {Json(std::string(text.substr(at, sequence_bytes(text[at]))))};
}

std::vector<std::string> characters(std::string_view text) {
  std::vector<std::string> all;
  while (!text.empty()) {
    const size_t bytes = std::min(text.size(), sequence_bytes(text[0]));
    all.emplace_back(text.substr(0, bytes));
    text.remove_prefix(bytes);
  }
  return all;
}

size_t leading_space(std::string_view text) {
  size_t at = 0;
  while (at < text.size()) {
    const size_t bytes = std::min(text.size() - at, sequence_bytes(text[at]));
    if (!is_space(text.substr(at, bytes))) break;
    at += bytes;
  }
  return at;
}

std::string strip(std::string_view text, bool left, bool right, const std::string* set) {
  const std::vector<std::string> stripped = set ? characters(*set) : std::vector<std::string>();
  const auto goes = [&](std::string_view character) {
    return set ? std::ranges::find(stripped, character) != stripped.end() : is_space(character);
  };
  if (left && !set) text.remove_prefix(leading_space(text));
  while (left && set && !text.empty()) {
    const size_t first = std::min(text.size(), sequence_bytes(text.front()));
    if (!goes(text.substr(0, first))) break;
    text.remove_prefix(first);
  }
  while (right && !text.empty()) {
    size_t last = text.size() - 1;
    while (last > 0 && (uint8_t(text[last]) & 0xc0) == 0x80) --last;
    if (!goes(text.substr(last))) break;
    text.remove_suffix(text.size() - last);
  }
  return std::string(text);
}

}  // namespace tandem::jinja
