// Filters, tests and methods of templates, by name.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "engine/chat/jinja_value.h"

namespace tandem::jinja {

struct Arguments {
  std::vector<Value> positional;
  std::vector<std::pair<std::string, Value>> keywords;

  /// Argument `index`, or of this name; undefined if it is absent.
  Value get(size_t index, std::string_view name) const;
};

/// These throw ConfigError naming a function that is not known, or whose arguments are wrong.
Value apply_filter(const std::string& name, const Value& value, const Arguments& arguments);
bool apply_test(const std::string& name, const Value& value, const Arguments& arguments);
Value call_method(const std::string& name, const Value& object, const Arguments& arguments);
/// Attribute or element of a dictionary or namespace; undefined if there is none.
Value attribute(const Value& object, const std::string& name);
/// Result of an operator for two numbers, an integer where Python's is one.
Value arithmetic(const std::string& op, const Value& a, const Value& b);
/// Python's list(range(…)).
Value range(const Arguments& given);
/// Local time as strftime() writes it; "" for more than 255 bytes.
Value now(const std::string& format);

}  // namespace tandem::jinja
