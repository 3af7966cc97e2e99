// Filters of templates.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "core/system/printable.h"
#include "engine/chat/jinja/jinja_case.h"
#include "engine/chat/jinja/jinja_format.h"
#include "engine/chat/jinja/jinja_functions.h"
#include "engine/chat/jinja/jinja_lists.h"
#include "engine/chat/jinja/jinja_text.h"

namespace tandem::jinja {
namespace {

constexpr int64_t kMaxIndent = 1000;

Value make_text(std::string value) {
  return {Json(std::move(value))};
}

int64_t length(const Value& value) {
  if (value.is_string()) return count_characters(value.string(""));
  if (value.is_list() || value.is_dict()) return int64_t(value.data->size());
  if (!value.is_defined()) return 0;
  fail("length: expected a string, list or dictionary");
}

Value indent(const Value& value, const Bound& a) {
  std::string space;
  if (a[0].is_string()) {
    space = a[0].string("");
  } else {
    const int64_t width = integer(a[0], 4, "indent");
    if (width > kMaxIndent) fail(fmt::format("indent: expected a width of up to {}", kMaxIndent));
    space = std::string(size_t(std::max<int64_t>(0, width)), ' ');
  }
  const bool indents_blank = flag(a[2], false);
  std::string result = flag(a[1], false) ? space : "";
  const std::vector<std::string> lines = split_lines(value.string("indent") + "\n");
  for (size_t i = 0; i < lines.size(); ++i) {
    if (i > 0) result += '\n';
    if (i > 0 && (indents_blank || !lines[i].empty())) result += space;
    result += lines[i];
    check_text(result.size());
  }
  return make_text(result);
}

/// Digits without the underscores between them; "" if one is elsewhere.
std::string without_underscores(const std::string& digits) {
  const auto is_digit = [&](size_t i) {
    return i < digits.size() && std::isalnum(static_cast<unsigned char>(digits[i])) != 0;
  };
  std::string number;
  for (size_t i = 0; i < digits.size(); ++i) {
    if (digits[i] != '_') number += digits[i];
    if (digits[i] == '_' && (i == 0 || !is_digit(i - 1) || !is_digit(i + 1))) return "";
  }
  return number;
}

/// Python's int() of a text; nullopt if it is none.
std::optional<int64_t> parse_integer(std::string digits, int64_t base) {
  if (base != 0 && (base < 2 || base > 36))
    fail(fmt::format("int: base {}: expected 2 to 36", base));
  digits = strip(digits, true, true);
  std::string number = without_underscores(digits);
  const size_t sign = number.starts_with('-') || number.starts_with('+') ? 1 : 0;
  constexpr struct {
    const char* prefix;
    int64_t base;
  } kPrefixes[] = {{"0x", 16}, {"0o", 8}, {"0b", 2}};
  for (const auto& [prefix, prefix_base] : kPrefixes) {
    const std::string two = lower(number.substr(std::min(sign, number.size()), 2));
    if (two != prefix || (base != prefix_base && base != 0)) continue;
    number.erase(sign, 2);
    base = prefix_base;
  }
  if (base == 0) base = 10;
  if (number.size() == sign || std::isalnum(static_cast<unsigned char>(number[sign])) == 0)
    return {};
  char* end = nullptr;
  errno = 0;
  const int64_t parsed = std::strtoll(number.c_str(), &end, int(base));
  if (end != number.c_str() + number.size()) return {};
  if (errno == ERANGE) fail(fmt::format("int: {}: expected 64 bits", printable(digits)));
  return parsed;
}

/// Python's float() of a value; nullopt if it is none.
std::optional<double> parse_float(const Value& value) {
  if (value.is_numeric()) return value.number();
  if (!value.is_string()) return {};
  const std::string number = without_underscores(strip(value.string(""), true, true));
  const std::string allowed = lower(number);
  if (number.empty() || allowed.find_first_of("xp(") != std::string::npos) return {};
  char* end = nullptr;
  const double parsed = std::strtod(number.c_str(), &end);
  if (end != number.c_str() + number.size()) return {};
  return parsed;
}

Value to_integer(const Value& value, const Bound& a) {
  if (!value.is_defined()) fail("int of an undefined value");
  if (value.is_int() || value.is_big()) return value;
  if (value.is_string()) {
    const auto parsed = parse_integer(value.string(""), integer(a[1], 10, "base"));
    if (parsed) return {Json(*parsed)};
  }
  const auto number = parse_float(value);
  if (!number || !std::isfinite(*number)) return a[0].is_defined() ? a[0] : Value(Json(0));
  if (std::fabs(*number) >= 0x1p63) fail("int: expected 64 bits");
  return {Json(int64_t(*number))};
}

Value to_float(const Value& value, const Bound& a) {
  if (!value.is_defined()) fail("float of an undefined value");
  const auto number = parse_float(value);
  if (!number) return a[0].is_defined() ? a[0] : Value(Json(0.0));
  return {Json(*number)};
}

Value absolute(const Value& value, const Bound&) {
  if (!value.is_numeric()) fail("abs: expected a number");
  if (value.is_number() && !value.is_int()) return {Json(std::fabs(value.number()))};
  const int64_t number = value.integer("abs");
  if (number == INT64_MIN) fail("abs: expected 64 bits");
  return {Json(std::abs(number))};
}

Value round(const Value& value, const Bound& a) {
  if (!value.is_numeric()) fail("round: expected a number");
  const int64_t precision = integer(a[0], 0, "precision");
  const std::string method = a[1].is_defined() ? a[1].string("method") : "common";
  if (std::abs(precision) > 15) fail("round: expected a precision of -15 to 15");
  if (method == "common" && precision >= 0) {
    if (!value.is_number() || value.is_int()) return {Json(value.integer(""))};
    // The nearest decimal, to even if it is halfway, as Python: by its decimal digits.
    return {Json(std::strtod(fmt::format("{:.{}f}", value.number(), precision).c_str(), nullptr))};
  }
  if (method != "ceil" && method != "floor") {
    fail(fmt::format("round: {}: expected common, with a precision of 0 or more, ceil or floor",
                     printable(method)));
  }
  const double scale = std::pow(10.0, double(precision));
  const double scaled = value.number() * scale;
  return {Json((method == "ceil" ? std::ceil(scaled) : std::floor(scaled)) / scale)};
}

Value truncate(const Value& value, const Bound& a) {
  const std::string& all = value.string("truncate");
  const std::string end = a[2].is_defined() ? a[2].string("end") : "...";
  const int64_t width = integer(a[0], 255, "length"), leeway = integer(a[3], 5, "leeway");
  const int64_t room = width - count_characters(end);
  if (room < 0 || leeway < 0) fail("truncate: expected a length of at least the end's");
  const std::vector<std::string> each = characters(all);
  if (int64_t(each.size()) <= width + leeway) return make_text(all);
  std::string result;
  for (int64_t i = 0; i < room; ++i) result += each[size_t(i)];
  const size_t blank = flag(a[1], false) ? std::string::npos : result.rfind(' ');
  return make_text(result.substr(0, blank) + end);
}

Value tojson(const Value& value, const Bound& a) {
  JsonStyle style;
  style.escapes = flag(a[0], false);
  const bool has_indent = a[1].is_defined() && !a[1].is_none();
  if (has_indent && a[1].is_string()) {
    style.indent = a[1].string("");
  } else if (has_indent) {
    const int64_t width = a[1].integer("indent");
    if (width > 100) fail("tojson: expected indent up to 100");
    style.indent = std::string(size_t(std::max<int64_t>(0, width)), ' ');
  }
  if (style.indent) style.item_separator = ",";
  if (a[2].is_defined() && !a[2].is_none()) {
    const std::vector<Value> both = elements(a[2]);
    if (both.size() != 2) fail("tojson: separators: expected two strings");
    style.item_separator = both[0].string("separators");
    style.key_separator = both[1].string("separators");
  }
  style.sorts_keys = flag(a[3], false);
  return make_text(to_json_text(value.json("tojson"), style));
}

Value default_value(const Value& value, const Bound& a) {
  const bool is_missing = flag(a[1], false) ? !is_true(value) : !value.is_defined();
  return !is_missing ? value : a[0].is_defined() ? a[0] : make_text("");
}

Value element(const Value& value, bool is_first) {
  const std::vector<Value> all = elements(value);
  return all.empty() ? Value() : is_first ? all.front() : all.back();
}

Value items(const Value& value, const Bound&) {
  if (value.is_defined() && !value.is_dict()) fail("items: expected a dictionary");
  return pairs(value);
}

Value reverse(const Value& value, const Bound&) {
  std::vector<Value> all = elements(value);
  std::ranges::reverse(all);
  if (!value.is_string()) return make_list(all);
  std::string reversed;
  for (const Value& each : all) reversed += to_text(each);
  return make_text(reversed);
}

Value trim(const Value& value, const Bound& a) {
  const bool has_set = a[0].is_defined() && !a[0].is_none();
  return make_text(strip(to_text(value), true, true, has_set ? &a[0].string("trim") : nullptr));
}

Value replace_filter(const Value& value, const Bound& a) {
  return make_text(
      replace(to_text(value), to_text(a[0]), to_text(a[1]), integer(a[2], -1, "count")));
}

/// Bytes other than letters, digits, "_.-~" and, but in queries, "/" as %XX.
std::string quote_url(const std::string& text, bool is_query) {
  std::string quoted;
  for (const char c : text) {
    const bool is_safe = std::isalnum(static_cast<unsigned char>(c)) != 0 ||
                         std::string_view("_.-~").find(c) != std::string_view::npos ||
                         (c == '/' && !is_query);
    quoted += is_safe                ? std::string(1, c)
              : c == ' ' && is_query ? "+"
                                     : fmt::format("%{:02X}", uint8_t(c));
  }
  return quoted;
}

Value urlencode(const Value& value, const Bound&) {
  if (!value.is_list() && !value.is_dict()) return make_text(quote_url(to_text(value), false));
  std::string query;
  for (const Value& each : elements(value.is_dict() ? pairs(value) : value)) {
    const std::vector<Value> both = elements(each);
    if (both.size() != 2) fail("urlencode: expected pairs of a name and a value");
    query += (query.empty() ? "" : "&") + quote_url(to_text(both[0]), true) + "=" +
             quote_url(to_text(both[1]), true);
    check_text(query.size());
  }
  return make_text(query);
}

constexpr Function kFilters[] = {
    {"abs", "", absolute},
    {"batch", "linecount! fill_with", batch},
    {"capitalize", "", [](auto& v, auto&) { return make_text(capitalize(to_text(v))); }},
    {"center", "width",
     [](auto& v, auto& a) {
       return make_text(pad(to_text(v), integer(a[0], 80, "width"), " ", true, true));
     }},
    {"count", "", [](auto& v, auto&) { return Value(Json(length(v))); }},
    {"d", "default_value boolean", default_value},
    {"default", "default_value boolean", default_value},
    {"dictsort", "case_sensitive by reverse", dictsort},
    {"first", "", [](auto& v, auto&) { return element(v, true); }},
    {"float", "default", to_float},
    {"groupby", "attribute! default case_sensitive", groupby},
    {"indent", "width first blank", indent},
    {"int", "default base", to_integer},
    {"items", "", items},
    {"join", "d attribute", join},
    {"last", "", [](auto& v, auto&) { return element(v, false); }},
    {"length", "", [](auto& v, auto&) { return Value(Json(length(v))); }},
    {"list", "", [](auto& v, auto&) { return make_list(elements(v)); }},
    {"lower", "", [](auto& v, auto&) { return make_text(lower(to_text(v))); }},
    {"max", "case_sensitive attribute", [](auto& v, auto& a) { return extreme(v, a, true); }},
    {"min", "case_sensitive attribute", [](auto& v, auto& a) { return extreme(v, a, false); }},
    {"replace", "old! new! count", replace_filter},
    {"reverse", "", reverse},
    {"round", "precision method", round},
    {"safe", "", [](auto& v, auto&) { return v; }},
    {"slice", "slices! fill_with", divide},
    {"sort", "reverse case_sensitive attribute", sort},
    {"string", "", [](auto& v, auto&) { return make_text(to_text(v)); }},
    {"sum", "attribute start", sum},
    {"title", "", [](auto& v, auto&) { return make_text(title_words(to_text(v))); }},
    {"tojson", "ensure_ascii indent separators sort_keys", tojson},
    {"trim", "chars", trim},
    {"truncate", "length killwords end leeway", truncate},
    {"unique", "case_sensitive attribute", unique},
    {"upper", "", [](auto& v, auto&) { return make_text(upper(to_text(v))); }},
    {"urlencode", "", urlencode},
};

/// The first argument, a name, which is removed.
std::string take_name(Arguments& arguments, const char* filter) {
  if (arguments.positional.empty()) fail(fmt::format("{}: expected a name", filter));
  const std::string name = arguments.positional[0].string(filter);
  arguments.positional.erase(arguments.positional.begin());
  return name;
}

/// Elements whose attribute, or that themselves, pass a test.
Value select(const Value& value, Arguments arguments, bool has_attribute, bool wanted) {
  Value name;
  if (has_attribute) {
    if (arguments.positional.empty()) fail("selectattr: expected an attribute");
    name = arguments.positional[0];
    arguments.positional.erase(arguments.positional.begin());
  }
  const bool has_test = !arguments.positional.empty();
  if (!has_test && !arguments.keywords.empty()) fail("select: expected a test");
  const std::string test = has_test ? take_name(arguments, "select") : "";
  std::vector<Value> chosen;
  for (const Value& each : elements(value)) {
    const Value tested = has_attribute ? path_attribute(each, name) : each;
    const bool passes = has_test ? apply_test(test, tested, arguments) : is_true(tested);
    if (passes == wanted) chosen.push_back(each);
  }
  return make_list(chosen);
}

Value map_filter(const Value& value, Arguments arguments) {
  std::vector<Value> results;
  std::string filter;
  Bound by_attribute;
  if (arguments.positional.empty()) {
    by_attribute = bind_arguments("map", "attribute! default", arguments);
  } else {
    filter = take_name(arguments, "map");
  }
  size_t bytes = 0;
  for (const Value& each : elements(value)) {
    if (by_attribute.empty()) {
      results.push_back(apply_filter(filter, each, arguments));
    } else {
      const Value found = path_attribute(each, by_attribute[0]);
      results.push_back(found.is_defined() ? found : by_attribute[1]);
    }
    if (results.back().is_string()) bytes += results.back().string("").size();
    check_text(bytes);
  }
  return make_list(results);
}

Value format_filter(const Value& value, const Arguments& arguments) {
  if (!arguments.positional.empty() && !arguments.keywords.empty()) {
    fail("format: expected values or names, not both");
  }
  Json values = make_sequence(*make_list(arguments.positional).data, SequenceKind::tuple);
  if (!arguments.keywords.empty()) values = Json::object();
  for (const auto& [name, each] : arguments.keywords) values[name] = each.json(name);
  return make_text(format_percent(to_text(value), Value(std::move(values))));
}

}  // namespace

Value apply_filter(const std::string& name, const Value& value, const Arguments& arguments) {
  if (name == "map") return map_filter(value, arguments);
  if (name == "select" || name == "reject") {
    return select(value, arguments, false, name == "select");
  }
  if (name == "selectattr" || name == "rejectattr") {
    return select(value, arguments, true, name == "selectattr");
  }
  if (name == "format") return format_filter(value, arguments);
  const Function* const filter = find(kFilters, name);
  if (!filter) fail(fmt::format("filter '{}' is not known", printable(name)));
  return call(*filter, value, arguments);
}

}  // namespace tandem::jinja
