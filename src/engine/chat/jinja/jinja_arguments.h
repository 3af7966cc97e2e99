// Arguments of filters, tests, methods and functions of templates, by the names that Jinja2 and
// Python give them.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/chat/jinja/jinja_value.h"

namespace tandem::jinja {

struct Arguments {
  std::vector<Value> positional;
  std::vector<std::pair<std::string, Value>> keywords;
};

/// Arguments in the order of a function's parameters; undefined where absent.
using Bound = std::vector<Value>;

/// `parameters`: names with spaces between them, "!" after those that must be given. Throws
/// ConfigError naming `function` for an argument that is missing, unknown, or too many.
Bound bind_arguments(std::string_view function, std::string_view parameters,
                     const Arguments& arguments);

/// Function of a template: of a value and its arguments.
struct Function {
  std::string_view name, parameters;
  Value (*run)(const Value& value, const Bound& arguments);
};

/// The function of this name; nullptr if there is none.
const Function* find(std::span<const Function> functions, std::string_view name);
/// Throws ConfigError also for arguments that do not fit.
Value call(const Function& function, const Value& value, const Arguments& arguments);

/// Argument of a type, or `absent`. `what` names it. Throws ConfigError for another type.
bool flag(const Value& value, bool absent);
int64_t integer(const Value& value, int64_t absent, std::string_view what);

}  // namespace tandem::jinja
