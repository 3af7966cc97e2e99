// Runs a template.
#pragma once

#include <map>
#include <string>

#include "engine/chat/jinja/syntax/jinja_syntax.h"

namespace tandem::jinja {

/// Text of the template with these variables. Throws ConfigError naming the line and the reason: a
/// construct that is not understood, raise_exception of the template, or too much work or text.
std::string run(const Node& root, std::map<std::string, Value> variables);

}  // namespace tandem::jinja
