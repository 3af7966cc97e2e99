// Forms in which files of tokenizers write bytes.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace tandem {

/// Bytes of a text in which each byte is written as one printable character, as GPT-2 does: itself
/// if it is one in Latin-1, else the next free one from U+0100. None if it has another character.
std::optional<std::string> bytes_of_characters(std::string_view text);
/// The byte that "<0x41>" is.
std::optional<uint8_t> byte_of_token(std::string_view text);
/// None for a text that is not base64.
std::optional<std::string> bytes_of_base64(std::string_view text);
std::string replace_all(std::string_view text, std::string_view from, std::string_view to);

}  // namespace tandem
