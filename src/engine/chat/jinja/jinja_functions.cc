#include "engine/chat/jinja/jinja_functions.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <ctime>

#include "core/system/printable.h"
#include "engine/chat/jinja/jinja_format.h"
#include "engine/chat/jinja/jinja_lists.h"
#include "engine/chat/jinja/jinja_text.h"

namespace tandem::jinja {
namespace {

constexpr int64_t kMaxRange = 100'000;

Value values(const Value& dictionary, const Bound&) {
  Json list = Json::array();
  for (const auto& each : dictionary.data->items()) list.push_back(each.value());
  return make_sequence(std::move(list), SequenceKind::values);
}

Value get(const Value& dictionary, const Bound& a) {
  if (a[0].is_string()) {
    const auto found = dictionary.data->find(a[0].string(""));
    if (found != dictionary.data->end()) return {dictionary, *found};
  }
  return a[1].is_defined() ? a[1] : Value(Json(nullptr));
}

Value index_of(const Value& list, const Bound& a) {
  const std::vector<Value> all = elements(list);
  const auto found =
      std::ranges::find_if(all, [&](const Value& each) { return equals(each, a[0]); });
  if (found == all.end()) fail("index: the value is not in the list");
  return {Json(found - all.begin())};
}

Value count_of(const Value& list, const Bound& a) {
  const std::vector<Value> all = elements(list);
  return {Json(std::ranges::count_if(all, [&](const Value& each) { return equals(each, a[0]); }))};
}

constexpr Function kDictMethods[] = {
    {"items", "",
     [](auto& v, auto&) { return Value(make_sequence(*pairs(v).data, SequenceKind::items)); }},
    {"keys", "",
     [](auto& v, auto&) {
       return Value(make_sequence(*make_list(elements(v)).data, SequenceKind::keys));
     }},
    {"values", "", values},
    {"get", "key! default", get},
    {"copy", "", [](auto& v, auto&) { return v; }},
};
constexpr Function kListMethods[] = {
    {"index", "value!", index_of},
    {"count", "value!", count_of},
    {"copy", "",
     [](auto& v, auto&) {
       if (v.is_tuple()) fail("copy of a tuple, which has no such method");
       return v;
     }},
};
constexpr std::string_view kDictAttributes[] = {"clear",      "copy",   "fromkeys", "get",
                                                "items",      "keys",   "pop",      "popitem",
                                                "setdefault", "update", "values"};

int64_t modulo(int64_t a, int64_t b) {
  const int64_t rest = b == -1 ? 0 : a % b;
  return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}

[[noreturn]] void out_of_range(const std::string& op) {
  fail(op + ": an integer beyond 64 bits");
}

int64_t integers(const std::string& op, int64_t a, int64_t b) {
  int64_t result = 0;
  bool is_over = false;
  if (op == "+") is_over = __builtin_add_overflow(a, b, &result);
  if (op == "-") is_over = __builtin_sub_overflow(a, b, &result);
  if (op == "*") is_over = __builtin_mul_overflow(a, b, &result);
  if (op == "%") result = modulo(a, b);
  if (op == "//") {
    is_over = __builtin_sub_overflow(a, modulo(a, b), &result) || (b == -1 && result == INT64_MIN);
    if (!is_over) result /= b;
  }
  if (op == "**") {
    result = 1;
    for (int64_t i = 0; i < b && !is_over && (a < -1 || a > 1); ++i) {
      is_over = __builtin_mul_overflow(result, a, &result);
    }
    if (a >= -1 && a <= 1) result = b == 0 || a == 1 || (a == -1 && b % 2 == 0) ? 1 : a;
  }
  if (is_over) out_of_range(op);
  return result;
}

}  // namespace

Value call_method(const std::string& name, const Value& object, const Arguments& arguments) {
  if (!object.is_string() && !object.is_dict() && !object.is_list()) {
    fail(fmt::format("method '{}': expected a string, list or dictionary", printable(name)));
  }
  if (name == "format" && object.is_string()) {
    return {Json(format_fields(object.string(""), arguments))};
  }
  const Function* const method = find(object.is_string() ? string_methods()
                                      : object.is_dict() ? std::span(kDictMethods)
                                                         : std::span<const Function>(kListMethods),
                                      name);
  if (!method) fail(fmt::format("method '{}' is not known", printable(name)));
  return call(*method, object, arguments);
}

bool is_dict_attribute(std::string_view name) {
  return std::ranges::find(kDictAttributes, name) != std::end(kDictAttributes);
}

Value attribute(const Value& object, const std::string& name) {
  if (object.space) {
    const auto found = object.space->find(name);
    return found == object.space->end() ? Value() : Value(*found);
  }
  if (!object.is_defined()) fail(fmt::format("'{}' of an undefined value", printable(name)));
  if (object.is_list() && kind_of(*object.data) == SequenceKind::group) {
    return name == "grouper" ? element_at(object, 0)
           : name == "list"  ? element_at(object, 1)
                             : Value();
  }
  if (!object.is_dict()) return {};
  const auto found = object.data->find(name);
  return found == object.data->end() ? Value() : Value(object, *found);
}

Value arithmetic(const std::string& op, const Value& a, const Value& b) {
  if (a.is_big() || b.is_big()) out_of_range(op);
  if (!a.is_numeric() || !b.is_numeric()) {
    fail(fmt::format("{} {} {}: expected two numbers, or two strings to add", printable(to_text(a)),
                     op, printable(to_text(b))));
  }
  const double x = a.number(), y = b.number();
  if ((op == "/" || op == "//" || op == "%") && y == 0) fail(op + ": division by 0");
  const bool are_int = (a.is_int() || a.is_bool()) && (b.is_int() || b.is_bool());
  if (are_int && op != "/" && !(op == "**" && y < 0)) {
    return {Json(integers(op, a.integer(""), b.integer("")))};
  }
  double result = op == "+"    ? x + y
                  : op == "-"  ? x - y
                  : op == "*"  ? x * y
                  : op == "/"  ? x / y
                  : op == "**" ? std::pow(x, y)
                  : op == "//" ? std::floor(x / y)
                               : x - y * std::floor(x / y);
  if (!std::isfinite(result)) fail(op + ": a number out of range");
  return {Json(result)};
}

Value range(const Arguments& given) {
  if (!given.keywords.empty()) fail("range: expected no keywords");
  const Bound a = bind_arguments("range", "start! stop step", given);
  const bool has_begin = a[1].is_defined();
  const int64_t begin = has_begin ? a[0].integer("range") : 0;
  const int64_t end = a[has_begin ? 1 : 0].integer("range");
  const int64_t step = a[2].is_defined() ? a[2].integer("range") : 1;
  if (step == 0) fail("range: expected a step other than 0");
  Json list = Json::array();
  for (int64_t i = begin; step > 0 ? i < end : i > end;) {
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
