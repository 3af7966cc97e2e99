#include "engine/chat/jinja_functions.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <ctime>
#include <functional>
#include <map>

#include "core/printable.h"

namespace tandem::jinja {
namespace {

using Filter = std::function<Value(const Value&, const Arguments&)>;
/// Index of an argument that has a keyword only.
constexpr size_t kNoPosition = 1000;
constexpr int64_t kMaxRange = 100'000;

using Test = std::function<bool(const Value&, const Arguments&)>;

[[noreturn]] void unknown(const char* what, const std::string& name) {
  fail(fmt::format("{} '{}' is not known", what, printable(name)));
}

Value make_list(const std::vector<Value>& values) {
  Json list = Json::array();
  for (const Value& each : values) list.push_back(each.json("element"));
  return {std::move(list)};
}

/// Text with each letter changed; `change` gets whether the letter before is one.
template <typename Change>
Value change_case(const Value& value, const Change& change) {
  std::string text = to_text(value);
  bool after_letter = false;
  for (char& c : text) {
    if (uint8_t(c) > 127) fail("upper or lower case of text beyond ASCII");
    c = char(change(static_cast<unsigned char>(c), after_letter));
    after_letter = std::isalpha(static_cast<unsigned char>(c)) != 0;
  }
  return {Json(text)};
}
Value upper(const Value& value) {
  return change_case(value, [](unsigned char c, bool) { return std::toupper(c); });
}
Value lower(const Value& value) {
  return change_case(value, [](unsigned char c, bool) { return std::tolower(c); });
}
Value title(const Value& value) {
  return change_case(
      value, [](unsigned char c, bool after) { return after ? std::tolower(c) : std::toupper(c); });
}
Value capitalize(const Value& value) {
  bool is_first = true;
  return change_case(value, [&](unsigned char c, bool) {
    return std::exchange(is_first, false) ? std::toupper(c) : std::tolower(c);
  });
}

Value items(const Value& value) {
  if (!value.is_defined()) return {Json::array()};
  if (!value.is_dict()) fail("items: expected a dictionary");
  Json list = Json::array();
  for (const auto& [key, each] : value.data->items()) list.push_back(Json::array({key, each}));
  return {std::move(list)};
}

int64_t length(const Value& value) {
  if (value.is_string()) return int64_t(characters(value.string("")).size());
  if (value.is_list() || value.is_dict()) return int64_t(value.data->size());
  if (!value.is_defined()) return 0;
  fail("length: expected a string, list or dictionary");
}

std::string replace(const std::string& text, const std::string& from, const std::string& to) {
  if (from.empty()) fail("replace '': expected at least one character");
  std::string result;
  size_t at = 0;
  for (size_t found; (found = text.find(from, at)) != std::string::npos; at = found + from.size()) {
    result.append(text, at, found - at).append(to);
    check_text(result.size());
  }
  return result.append(text, at);
}

Value join(const Value& value, const Arguments& arguments) {
  const Value separator = arguments.get(0, "d"), name = arguments.get(1, "attribute");
  std::string text;
  bool is_first = true;
  for (const Value& each : elements(value)) {
    if (!std::exchange(is_first, false)) text += to_text(separator);
    text += to_text(name.is_defined() ? attribute(each, name.string("join")) : each);
    check_text(text.size());
  }
  return {Json(text)};
}

Value split(const std::string& text, const Arguments& arguments) {
  const Value separator = arguments.get(0, "sep"), max = arguments.get(1, "maxsplit");
  int64_t left = max.is_defined() ? max.integer("split") : -1;
  Json list = Json::array();
  if (!separator.is_defined() || separator.is_none()) {
    const std::string stripped = strip(text, true, false);
    for (std::string_view rest = stripped; !rest.empty();) {
      size_t end = 0;
      while (end < rest.size() && std::isspace(static_cast<unsigned char>(rest[end])) == 0) ++end;
      if (left-- == 0) end = rest.size();
      list.push_back(std::string(rest.substr(0, end)));
      rest.remove_prefix(end);
      rest.remove_prefix(leading_space(rest));
    }
    return {std::move(list)};
  }
  const std::string& by = separator.string("split");
  if (by.empty()) fail("split '': expected at least one character");
  size_t at = 0;
  for (size_t found; left-- != 0 && (found = text.find(by, at)) != std::string::npos;
       at = found + by.size()) {
    list.push_back(text.substr(at, found - at));
  }
  list.push_back(text.substr(at));
  return {std::move(list)};
}

Value indent(const Value& value, const Arguments& arguments) {
  const Value width = arguments.get(0, "width"), first = arguments.get(1, "first");
  const int64_t count = width.is_defined() ? width.integer("indent") : 4;
  if (count < 0 || count > 1000) fail("indent: expected a width of 0 to 1000");
  const std::string space(size_t(count), ' ');
  std::string result = is_true(first) ? space : "";
  const std::string text = to_text(value);
  for (size_t i = 0; i < text.size(); ++i) {
    result += text[i];
    if (text[i] == '\n' && i + 1 < text.size() && text[i + 1] != '\n') result += space;
    check_text(result.size());
  }
  return {Json(result)};
}

/// Elements whose attribute, or that themselves, pass a test.
Value select(const Value& value, Arguments arguments, bool has_attribute, bool wanted) {
  Value name;
  if (has_attribute) {
    name = arguments.get(0, "");
    if (!arguments.positional.empty()) arguments.positional.erase(arguments.positional.begin());
  }
  std::string test;
  if (!arguments.positional.empty()) {
    test = arguments.positional[0].string("select");
    arguments.positional.erase(arguments.positional.begin());
  }
  std::vector<Value> chosen;
  for (const Value& each : elements(value)) {
    const Value tested = has_attribute ? attribute(each, name.string("selectattr")) : each;
    const bool passes = test.empty() ? is_true(tested) : apply_test(test, tested, arguments);
    if (passes == wanted) chosen.push_back(each);
  }
  return make_list(chosen);
}

Value map_filter(const Value& value, Arguments arguments) {
  const Value name = arguments.get(kNoPosition, "attribute");
  std::vector<Value> results;
  std::string filter;
  if (!name.is_defined()) {
    filter = arguments.get(0, "").string("map");
    arguments.positional.erase(arguments.positional.begin());
  }
  size_t bytes = 0;
  for (const Value& each : elements(value)) {
    results.push_back(name.is_defined() ? attribute(each, name.string("map"))
                                        : apply_filter(filter, each, arguments));
    if (results.back().is_string()) bytes += results.back().string("").size();
    check_text(bytes);
  }
  return make_list(results);
}

Value to_integer(const Value& value) {
  if (value.is_number()) return {Json(int64_t(value.data->get<double>()))};
  if (value.is_bool()) return {Json(int64_t(is_true(value)))};
  const std::string text = strip(to_text(value), true, true);
  const Json parsed = Json::parse(text, nullptr, false);
  return {Json(parsed.is_number() ? int64_t(parsed.get<double>()) : int64_t{0})};
}

Value element(const Value& value, bool is_first) {
  const std::vector<Value> all = elements(value);
  return all.empty() ? Value() : is_first ? all.front() : all.back();
}

Value tojson(const Value& value, const Arguments& arguments) {
  for (const auto& [keyword, each] : arguments.keywords) {
    if (keyword == "ensure_ascii" && !is_true(each)) continue;
    if (keyword != "indent") fail(fmt::format("tojson: {}: expected indent", printable(keyword)));
  }
  const Value indent = arguments.get(kNoPosition, "indent");
  if (!arguments.positional.empty()) fail("tojson: expected indent=");
  const bool has_indent = indent.is_defined() && !indent.is_none();
  const int64_t width = has_indent ? indent.integer("indent") : -1;
  if (width > 100) fail("tojson: expected indent up to 100");
  return {Json(to_json_text(value.json("tojson"), int(std::max<int64_t>(-1, width))))};
}

Value stripped(const Value& value, const Arguments& arguments, bool left, bool right) {
  const Value set = arguments.get(0, "chars");
  const std::string characters = set.is_string() ? set.string("") : "";
  return {Json(strip(to_text(value), left, right, set.is_string() ? &characters : nullptr))};
}

const std::map<std::string, Filter>& filters() {
  static const std::map<std::string, Filter> kFilters = {
      {"trim", [](auto& v, auto& a) { return stripped(v, a, true, true); }},
      {"tojson", tojson},
      {"join", join},
      {"length", [](auto& v, auto&) { return Value(Json(length(v))); }},
      {"count", [](auto& v, auto&) { return Value(Json(length(v))); }},
      {"upper", [](auto& v, auto&) { return upper(v); }},
      {"lower", [](auto& v, auto&) { return lower(v); }},
      {"title", [](auto& v, auto&) { return title(v); }},
      {"capitalize", [](auto& v, auto&) { return capitalize(v); }},
      {"items", [](auto& v, auto&) { return items(v); }},
      {"list", [](auto& v, auto&) { return make_list(elements(v)); }},
      {"string", [](auto& v, auto&) { return Value(Json(to_text(v))); }},
      {"safe", [](auto& v, auto&) { return v; }},
      {"int", [](auto& v, auto&) { return to_integer(v); }},
      {"first", [](auto& v, auto&) { return element(v, true); }},
      {"last", [](auto& v, auto&) { return element(v, false); }},
      {"reverse",
       [](auto& v, auto&) {
         std::vector<Value> all = elements(v);
         std::ranges::reverse(all);
         if (!v.is_string()) return make_list(all);
         std::string text;
         for (const Value& each : all) text += to_text(each);
         return Value(Json(text));
       }},
      {"indent", indent},
      {"map", [](auto& v, auto& a) { return map_filter(v, a); }},
      {"select", [](auto& v, auto& a) { return select(v, a, false, true); }},
      {"reject", [](auto& v, auto& a) { return select(v, a, false, false); }},
      {"selectattr", [](auto& v, auto& a) { return select(v, a, true, true); }},
      {"rejectattr", [](auto& v, auto& a) { return select(v, a, true, false); }},
      {"replace",
       [](auto& v, auto& a) {
         return Value(Json(replace(to_text(v), a.get(0, "old").string("replace"),
                                   a.get(1, "new").string("replace"))));
       }},
      {"default",
       [](auto& v, auto& a) {
         const bool is_missing = is_true(a.get(1, "boolean")) ? !is_true(v) : !v.is_defined();
         const Value other = a.get(0, "default_value");
         return !is_missing ? v : other.is_defined() ? other : Value(Json(""));
       }},
  };
  return kFilters;
}

const std::map<std::string, Test>& tests() {
  const auto compare = [](const std::function<bool(const Value&, const Value&)>& holds) {
    return [holds](const Value& v, const Arguments& a) { return holds(v, a.get(0, "other")); };
  };
  static const std::map<std::string, Test> kTests = {
      {"defined", [](auto& v, auto&) { return v.is_defined(); }},
      {"undefined", [](auto& v, auto&) { return !v.is_defined(); }},
      {"none", [](auto& v, auto&) { return v.is_none(); }},
      {"string", [](auto& v, auto&) { return v.is_string(); }},
      {"mapping", [](auto& v, auto&) { return v.is_dict(); }},
      {"sequence", [](auto& v, auto&) { return v.is_list() || v.is_string() || v.is_dict(); }},
      {"iterable",
       [](auto& v, auto&) {
         return v.is_list() || v.is_string() || v.is_dict() || !v.is_defined();
       }},
      {"number", [](auto& v, auto&) { return v.is_number() || v.is_bool(); }},
      {"integer", [](auto& v, auto&) { return v.is_int(); }},
      {"float", [](auto& v, auto&) { return v.is_number() && !v.is_int(); }},
      {"boolean", [](auto& v, auto&) { return v.is_bool(); }},
      {"true", [](auto& v, auto&) { return v.is_bool() && is_true(v); }},
      {"false", [](auto& v, auto&) { return v.is_bool() && !is_true(v); }},
      {"odd", [](auto& v, auto&) { return v.integer("odd") % 2 != 0; }},
      {"even", [](auto& v, auto&) { return v.integer("even") % 2 == 0; }},
      {"divisibleby",
       [](auto& v, auto& a) {
         const int64_t by = a.get(0, "num").integer("divisibleby");
         if (by == 0 || by == -1) fail("divisibleby: expected a number other than 0 and -1");
         return v.integer("divisibleby") % by == 0;
       }},
      {"equalto", compare(equals)},
      {"eq", compare(equals)},
      {"sameas", compare(equals)},
      {"ne", compare([](auto& a, auto& b) { return !equals(a, b); })},
      {"in", compare([](auto& a, auto& b) { return contains(b, a); })},
      {"lt", compare(is_less)},
      {"gt", compare([](auto& a, auto& b) { return is_less(b, a); })},
  };
  return kTests;
}

const std::map<std::string, Filter>& string_methods() {
  static const std::map<std::string, Filter> kMethods = {
      {"strip", [](auto& v, auto& a) { return stripped(v, a, true, true); }},
      {"lstrip", [](auto& v, auto& a) { return stripped(v, a, true, false); }},
      {"rstrip", [](auto& v, auto& a) { return stripped(v, a, false, true); }},
      {"split", [](auto& v, auto& a) { return split(v.string(""), a); }},
      {"startswith",
       [](auto& v, auto& a) {
         return Value(Json(v.string("").starts_with(a.get(0, "prefix").string("startswith"))));
       }},
      {"endswith",
       [](auto& v, auto& a) {
         return Value(Json(v.string("").ends_with(a.get(0, "suffix").string("endswith"))));
       }},
      {"join",
       [](auto& v, auto& a) {
         return join(a.get(0, "iterable"), Arguments{{v}, {}});
       }},
      {"upper", [](auto& v, auto&) { return upper(v); }},
      {"lower", [](auto& v, auto&) { return lower(v); }},
      {"title", [](auto& v, auto&) { return title(v); }},
      {"capitalize", [](auto& v, auto&) { return capitalize(v); }},
      {"replace", filters().at("replace")},
  };
  return kMethods;
}

const std::map<std::string, Filter>& dict_methods() {
  static const std::map<std::string, Filter> kMethods = {
      {"items", [](auto& v, auto&) { return items(v); }},
      {"keys", [](auto& v, auto&) { return make_list(elements(v)); }},
      {"values",
       [](auto& v, auto&) {
         Json list = Json::array();
         for (const auto& each : v.data->items()) list.push_back(each.value());
         return Value(std::move(list));
       }},
      {"get",
       [](auto& v, auto& a) {
         const Value found = attribute(v, a.get(0, "key").string("get"));
         if (found.is_defined()) return found;
         const Value other = a.get(1, "default");
         return other.is_defined() ? other : Value(Json(nullptr));
       }},
  };
  return kMethods;
}

}  // namespace

Value Arguments::get(size_t index, std::string_view name) const {
  if (index < positional.size()) return positional[index];
  for (const auto& [keyword, value] : keywords) {
    if (keyword == name) return value;
  }
  return {};
}

Value apply_filter(const std::string& name, const Value& value, const Arguments& arguments) {
  const auto found = filters().find(name == "d" ? "default" : name);
  if (found == filters().end()) unknown("filter", name);
  return found->second(value, arguments);
}

bool apply_test(const std::string& name, const Value& value, const Arguments& arguments) {
  const auto found = tests().find(name == "==" ? "eq" : name);
  if (found == tests().end()) unknown("test", name);
  return found->second(value, arguments);
}

Value call_method(const std::string& name, const Value& object, const Arguments& arguments) {
  if (!object.is_string() && !object.is_dict()) {
    fail(fmt::format("method '{}': expected a string or a dictionary", printable(name)));
  }
  const auto& methods = object.is_string() ? string_methods() : dict_methods();
  const auto found = methods.find(name);
  if (found == methods.end()) unknown("method", name);
  return found->second(object, arguments);
}

Value attribute(const Value& object, const std::string& name) {
  if (object.space) {
    const auto found = object.space->find(name);
    return found == object.space->end() ? Value() : Value(*found);
  }
  if (!object.is_defined()) fail(fmt::format("'{}' of an undefined value", printable(name)));
  if (!object.is_dict()) return {};
  const auto found = object.data->find(name);
  return found == object.data->end() ? Value() : Value(object, *found);
}

Value arithmetic(const std::string& op, const Value& a, const Value& b) {
  if (!a.is_numeric() || !b.is_numeric()) {
    fail(fmt::format("{} {} {}: expected two numbers, or two strings to add", printable(to_text(a)),
                     op, printable(to_text(b))));
  }
  const double x = a.number(), y = b.number();
  if ((op == "/" || op == "//" || op == "%") && y == 0) fail(op + ": division by 0");
  double result = op == "+"    ? x + y
                  : op == "-"  ? x - y
                  : op == "*"  ? x * y
                  : op == "/"  ? x / y
                  : op == "**" ? std::pow(x, y)
                  : op == "//" ? std::floor(x / y)
                               : x - y * std::floor(x / y);
  const bool are_int = (a.is_int() || a.is_bool()) && (b.is_int() || b.is_bool());
  const bool is_int = are_int && op != "/" && std::fabs(result) < 0x1p53;
  return is_int ? Value(Json(int64_t(result))) : Value(Json(result));
}

Value range(const Arguments& given) {
  const bool has_begin = given.positional.size() > 1;
  const int64_t begin = has_begin ? given.get(0, "").integer("range") : 0;
  const int64_t end = given.get(has_begin ? 1 : 0, "").integer("range");
  const int64_t step = given.positional.size() > 2 ? given.get(2, "").integer("range") : 1;
  Json list = Json::array();
  for (int64_t i = begin; step > 0 ? i < end : step < 0 && i > end;) {
    list.push_back(i);
    if (int64_t(list.size()) > kMaxRange) fail(fmt::format("range of more than {}", kMaxRange));
    if (__builtin_add_overflow(i, step, &i)) break;
  }
  return {std::move(list)};
}

Value now(const std::string& format) {
  const std::time_t seconds = std::time(nullptr);
  std::tm local{};
  localtime_r(&seconds, &local);
  char text[256];
  const size_t bytes = std::strftime(text, sizeof text, format.c_str(), &local);
  return {Json(std::string(text, bytes))};
}

}  // namespace tandem::jinja
