// Filters, tests, methods and functions of templates, by name.
#pragma once

#include <string>

#include "engine/chat/jinja/jinja_arguments.h"

namespace tandem::jinja {

/// These throw ConfigError naming a function that is not known, or whose arguments are wrong.
Value apply_filter(const std::string& name, const Value& value, const Arguments& arguments);
bool apply_test(const std::string& name, const Value& value, const Arguments& arguments);
Value call_method(const std::string& name, const Value& object, const Arguments& arguments);
/// Whether dictionaries of Python have an attribute of this name, which hides their element.
bool is_dict_attribute(std::string_view name);
/// Attribute or element of a dictionary or namespace; undefined if there is none.
Value attribute(const Value& object, const std::string& name);
/// Result of an operator for two numbers, an integer where Python's is one. Throws ConfigError for
/// integers beyond 64 bits.
Value arithmetic(const std::string& op, const Value& a, const Value& b);
/// Python's list(range(…)).
Value range(const Arguments& given);
/// Local time as strftime() writes it; "" for more than 255 bytes.
Value now(const std::string& format);

}  // namespace tandem::jinja
