#include "core/printable.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>

namespace tandem {

std::string printable(std::string_view text, size_t most) {
  size_t kept = std::min(text.size(), most);
  // Not inside a character of UTF-8.
  while (kept < text.size() && kept > 0 && (uint8_t(text[kept]) & 0xc0) == 0x80) --kept;
  std::string line(text.substr(0, kept));
  std::replace_if(
      line.begin(), line.end(), [](char c) { return uint8_t(c) < 0x20 || c == 0x7f; }, '?');
  return kept == text.size() ? line : fmt::format("{}... ({} bytes)", line, text.size());
}

}  // namespace tandem
