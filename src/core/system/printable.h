// External text made safe for a one-line message or a command to paste.
#pragma once

#include <string>
#include <string_view>

namespace tandem {

/// `text` on one line of at most `maximum` bytes: control characters become '?', a longer text is
/// cut and its length appended, as in "aaaa... (10000000 bytes)".
std::string printable(std::string_view text, size_t maximum = 100);

/// `text` on one line that is safe to show on a terminal: spaces for line breaks and tabs, '?' for
/// other control characters (C0, DEL, C1) and for bytes that are not UTF-8. File names may contain
/// them.
std::string single_line(std::string_view text);

/// `word` quoted for a shell if necessary. The result is one line without control characters.
std::string shell_quote(std::string_view word);

}  // namespace tandem
