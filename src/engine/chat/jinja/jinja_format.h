// Python's formatting of strings: the operator % and the method format.
#pragma once

#include <string>

#include "engine/chat/jinja/jinja_arguments.h"

namespace tandem::jinja {

/// `format % values`: a tuple's values, a dictionary's by name, or one value. Throws ConfigError
/// naming the conversion for a value that does not fit it, too few or too many values.
std::string format_percent(const std::string& format, const Value& values);

/// `format.format(…)`: fields {}, {0}, {name}, with attributes, elements, !r, !s and a format of
/// the value. Throws ConfigError naming the field.
std::string format_fields(const std::string& format, const Arguments& arguments);

}  // namespace tandem::jinja
