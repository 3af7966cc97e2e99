// Text from outside inside a message of one line, and inside a command to paste.
#pragma once

#include <string>
#include <string_view>

namespace tandem {

/// `text` on one line of at most `most` bytes: control characters are '?', and what is left out of
/// a longer text is told by its length, as in "aaaa... (10000000 bytes)".
std::string printable(std::string_view text, size_t most = 100);

/// `text` on one line that a terminal only shows: spaces for line breaks and tabs, '?' for other
/// control characters (C0, DEL, C1) and for bytes that are no UTF-8. Names of files may have them.
std::string single_line(std::string_view text);

/// `word` as a shell reads it: as it is, or quoted where it needs that. The result, too, is one
/// line without control characters.
std::string shell_quote(std::string_view word);

}  // namespace tandem
