// Python's methods of strings, which filters of templates use, too.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/chat/jinja/jinja_arguments.h"

namespace tandem::jinja {

/// Methods of strings.
std::span<const Function> string_methods();

/// `count` below 0: all. Throws ConfigError for more than kMaxText.
std::string replace(const std::string& text, const std::string& from, const std::string& to,
                    int64_t count);
/// Splits like Python: also at line ends beyond "\n".
std::vector<std::string> split_lines(std::string_view text, bool keeps_ends = false);
/// From the end with `from_end`; `separator`: nullptr for white space; `max` below 0: all.
std::vector<std::string> split(std::string_view text, const std::string* separator, int64_t max,
                               bool from_end);
Value make_strings(const std::vector<std::string>& strings);
int64_t count_characters(std::string_view text);
/// Spaces, or `fill`, that make a text `width` characters wide.
std::string pad(const std::string& text, int64_t width, const std::string& fill, bool left,
                bool right);

}  // namespace tandem::jinja
