#include "core/system/printable.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <cstdint>

namespace tandem {
namespace {

/// Length of the UTF-8 character at the start of `text`; 0 if invalid.
size_t character_bytes(std::string_view text) {
  const auto byte = [&](size_t i) { return i < text.size() ? uint8_t(text[i]) : uint8_t(0); };
  const uint8_t first = byte(0);
  const size_t bytes = first < 0x80   ? 1
                       : first < 0xc2 ? 0
                       : first < 0xe0 ? 2
                       : first < 0xf0 ? 3
                       : first < 0xf5 ? 4
                                      : 0;
  for (size_t i = 1; i < bytes; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
  }
  const bool overlong = (first == 0xe0 && byte(1) < 0xa0) || (first == 0xf0 && byte(1) < 0x90);
  const bool surrogate = first == 0xed && byte(1) >= 0xa0;
  const bool too_large = first == 0xf4 && byte(1) >= 0x90;
  return overlong || surrogate || too_large ? 0 : bytes;
}

/// Whether a valid UTF-8 character is a terminal control character.
bool is_control(std::string_view character) {
  const auto first = uint8_t(character[0]);
  if (character.size() == 2) return first == 0xc2 && uint8_t(character[1]) < 0xa0;  // C1
  return first < 0x20 || first == 0x7f;
}

/// Calls `visit(character, shown)` for each; `shown`: valid UTF-8 and no control character.
template <typename Visit>
void for_each_character(std::string_view text, const Visit& visit) {
  while (!text.empty()) {
    const size_t bytes = character_bytes(text);
    const std::string_view character = text.substr(0, std::max<size_t>(1, bytes));
    visit(character, bytes > 0 && !is_control(character));
    text.remove_prefix(character.size());
  }
}

}  // namespace

std::string printable(std::string_view text, size_t maximum) {
  size_t length = std::min(text.size(), maximum);
  // Do not cut inside a UTF-8 character.
  while (length < text.size() && length > 0 && (uint8_t(text[length]) & 0xc0) == 0x80) --length;
  std::string line(text.substr(0, length));
  std::replace_if(
      line.begin(), line.end(), [](char c) { return uint8_t(c) < 0x20 || c == 0x7f; }, '?');
  line = single_line(line);
  return length == text.size() ? line : fmt::format("{}... ({} bytes)", line, text.size());
}

std::string single_line(std::string_view text) {
  std::string line;
  line.reserve(text.size());
  for_each_character(text, [&](std::string_view character, bool shown) {
    const char c = character[0];
    shown ? line += character : line += c == '\n' || c == '\r' || c == '\t' ? ' ' : '?';
  });
  return line;
}

std::string shell_quote(std::string_view word) {
  const auto needs_no_quotes = [](char c) {
    return std::isalnum(uint8_t(c)) || std::string_view("_-./:,=+@%").find(c) != std::string::npos;
  };
  if (!word.empty() && std::ranges::all_of(word, needs_no_quotes)) return std::string(word);
  std::string quoted, escaped;  // '...', and $'...' if there are control characters
  bool all_shown = true;
  for_each_character(word, [&](std::string_view character, bool shown) {
    all_shown = all_shown && shown;
    quoted += character == "'" ? "'\\''" : character;
    if (character == "'" || character == "\\") escaped += '\\';
    if (shown) {
      escaped += character;
    } else {
      for (const char c : character) escaped += fmt::format("\\x{:02x}", uint8_t(c));
    }
  });
  return all_shown ? "'" + quoted + "'" : "$'" + escaped + "'";
}

}  // namespace tandem
