// Upper and lower case of texts, and kinds of characters, as Python's strings have them.
#pragma once

#include <cstdint>
#include <string>

namespace tandem::jinja {

/// Characters with an upper case of several letters are changed as far as published texts have them
/// (ß, ligatures); for polytonic Greek and the like these throw ConfigError naming the character.
std::string upper(const std::string& text);
std::string lower(const std::string& text);
std::string casefold(const std::string& text);
std::string swap_case(const std::string& text);
std::string capitalize(const std::string& text);
/// Method `title`: a letter that follows none is upper case.
std::string title(const std::string& text);
/// Filter `title`: letters after white space, "-" or an opening bracket are upper case.
std::string title_words(const std::string& text);
/// The methods isupper and islower.
bool has_case(const std::string& text, bool is_upper);

enum class Letters : uint8_t { isalpha, isdecimal, isdigit, isnumeric, isalnum };
/// Whether there is a character and the method of this name holds for each. Throws ConfigError for
/// numbers that are no decimal digits.
bool consists_of(const std::string& text, Letters letters);

}  // namespace tandem::jinja
