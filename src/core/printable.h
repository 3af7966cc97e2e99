// Text from outside inside a message of one line.
#pragma once

#include <string>
#include <string_view>

namespace tandem {

/// `text` on one line of at most `most` bytes: control characters are '?', and what is left out of
/// a longer text is told by its length, as in "aaaa... (10000000 bytes)".
std::string printable(std::string_view text, size_t most = 100);

}  // namespace tandem
