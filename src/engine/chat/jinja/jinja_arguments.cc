#include "engine/chat/jinja/jinja_arguments.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/system/printable.h"

namespace tandem::jinja {
namespace {

struct Parameter {
  std::string_view name;
  bool is_required;
};

std::vector<Parameter> parse_parameters(std::string_view text) {
  std::vector<Parameter> all;
  while (!text.empty()) {
    const size_t end = std::min(text.find(' '), text.size());
    std::string_view name = text.substr(0, end);
    const bool is_required = name.ends_with('!');
    if (is_required) name.remove_suffix(1);
    all.push_back({name, is_required});
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return all;
}

}  // namespace

Bound bind_arguments(std::string_view function, std::string_view parameters,
                     const Arguments& arguments) {
  const std::vector<Parameter> all = parse_parameters(parameters);
  if (arguments.positional.size() > all.size()) {
    fail(fmt::format("{}: {} arguments: expected at most {}", function, arguments.positional.size(),
                     all.size()));
  }
  Bound bound = arguments.positional;
  std::vector<bool> is_given(all.size());
  std::fill_n(is_given.begin(), bound.size(), true);
  bound.resize(all.size());
  for (const auto& [keyword, value] : arguments.keywords) {
    const auto found = std::ranges::find(all, std::string_view(keyword), &Parameter::name);
    const auto index = size_t(found - all.begin());
    if (found == all.end() || is_given[index]) {
      fail(fmt::format("{}: {}={}: {}", function, printable(keyword), printable(to_text(value)),
                       found == all.end() ? "no such argument" : "given twice"));
    }
    bound[index] = value;
    is_given[index] = true;
  }
  for (size_t i = 0; i < all.size(); ++i) {
    if (all[i].is_required && !is_given[i]) {
      fail(fmt::format("{}: no {}: expected a value", function, all[i].name));
    }
  }
  return bound;
}

const Function* find(std::span<const Function> functions, std::string_view name) {
  const auto found = std::ranges::find(functions, name, &Function::name);
  return found == functions.end() ? nullptr : &*found;
}

Value call(const Function& function, const Value& value, const Arguments& arguments) {
  return function.run(value, bind_arguments(function.name, function.parameters, arguments));
}

bool flag(const Value& value, bool absent) {
  return value.is_defined() ? is_true(value) : absent;
}

int64_t integer(const Value& value, int64_t absent, std::string_view what) {
  return value.is_defined() && !value.is_none() ? value.integer(what) : absent;
}

}  // namespace tandem::jinja
