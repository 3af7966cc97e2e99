// Tests of templates, as `x is defined`.
#include <fmt/format.h>

#include "core/system/printable.h"
#include "engine/chat/jinja/jinja_case.h"
#include "engine/chat/jinja/jinja_functions.h"
#include "engine/chat/jinja/jinja_text.h"

namespace tandem::jinja {
namespace {

Value truth(bool holds) {
  return {Json(holds)};
}

/// Whether the two are one object in Python, where that is certain.
bool is_same(const Value& a, const Value& b) {
  constexpr int64_t kMinShared = -5, kMaxShared = 256;  // integers that are one object each
  if (!a.data || !b.data) return !a.is_defined() && !b.is_defined();
  if (a.data->type() != b.data->type() && !(a.is_int() && b.is_int())) return false;
  if (a.is_none() || a.is_bool()) return *a.data == *b.data;
  if (a.data.get() == b.data.get()) return true;
  if (a.is_int()) {
    const int64_t number = a.integer("");
    if (number != b.integer("")) return false;
    if (number >= kMinShared && number <= kMaxShared) return true;
  } else if (!equals(a, b)) {
    return false;
  }
  fail("sameas: expected none, booleans or small integers, or values that differ");
}

bool divides(const Value& value, const Value& by) {
  const int64_t divisor = by.integer("divisibleby");
  if (divisor == 0) fail("divisibleby: expected a number other than 0");
  return divisor == -1 || value.integer("divisibleby") % divisor == 0;
}

constexpr Function kTests[] = {
    {"boolean", "", [](auto& v, auto&) { return truth(v.is_bool()); }},
    {"callable", "", [](auto& v, auto&) { return truth(v.macro || !v.is_defined()); }},
    {"defined", "", [](auto& v, auto&) { return truth(v.is_defined()); }},
    {"divisibleby", "num!", [](auto& v, auto& a) { return truth(divides(v, a[0])); }},
    {"eq", "other!", [](auto& v, auto& a) { return truth(equals(v, a[0])); }},
    {"even", "", [](auto& v, auto&) { return truth(v.integer("even") % 2 == 0); }},
    {"false", "", [](auto& v, auto&) { return truth(v.is_bool() && !is_true(v)); }},
    {"float", "", [](auto& v, auto&) { return truth(v.is_number() && !v.is_int()); }},
    {"ge", "other!", [](auto& v, auto& a) { return truth(!is_less(v, a[0])); }},
    {"gt", "other!", [](auto& v, auto& a) { return truth(is_less(a[0], v)); }},
    {"in", "seq!", [](auto& v, auto& a) { return truth(contains(a[0], v)); }},
    {"integer", "", [](auto& v, auto&) { return truth(v.is_int() || v.is_big()); }},
    {"iterable", "",
     [](auto& v, auto&) {
       return truth(v.is_list() || v.is_string() || v.is_dict() || !v.is_defined());
     }},
    {"le", "other!", [](auto& v, auto& a) { return truth(!is_less(a[0], v)); }},
    {"lower", "", [](auto& v, auto&) { return truth(has_case(to_text(v), false)); }},
    {"lt", "other!", [](auto& v, auto& a) { return truth(is_less(v, a[0])); }},
    {"mapping", "", [](auto& v, auto&) { return truth(v.is_dict()); }},
    {"ne", "other!", [](auto& v, auto& a) { return truth(!equals(v, a[0])); }},
    {"none", "", [](auto& v, auto&) { return truth(v.is_none()); }},
    {"number", "", [](auto& v, auto&) { return truth(v.is_numeric() || v.is_big()); }},
    {"odd", "", [](auto& v, auto&) { return truth(v.integer("odd") % 2 != 0); }},
    {"sameas", "other!", [](auto& v, auto& a) { return truth(is_same(v, a[0])); }},
    {"sequence", "",
     [](auto& v, auto&) {
       return truth(v.is_list() || v.is_string() || v.is_dict() || !v.is_defined());
     }},
    {"string", "", [](auto& v, auto&) { return truth(v.is_string()); }},
    {"true", "", [](auto& v, auto&) { return truth(v.is_bool() && is_true(v)); }},
    {"undefined", "", [](auto& v, auto&) { return truth(!v.is_defined()); }},
    {"upper", "", [](auto& v, auto&) { return truth(has_case(to_text(v), true)); }},
};

constexpr std::pair<std::string_view, std::string_view> kOtherNames[] = {
    {"equalto", "eq"}, {"==", "eq"},       {"!=", "ne"}, {"greaterthan", "gt"}, {">", "gt"},
    {">=", "ge"},      {"lessthan", "lt"}, {"<", "lt"},  {"<=", "le"}};

}  // namespace

bool apply_test(const std::string& name, const Value& value, const Arguments& arguments) {
  std::string_view known = name;
  for (const auto& [other, its_name] : kOtherNames) {
    if (name == other) known = its_name;
  }
  const Function* const test = find(kTests, known);
  if (!test) fail(fmt::format("test '{}' is not known", printable(name)));
  return is_true(call(*test, value, arguments));
}

}  // namespace tandem::jinja
