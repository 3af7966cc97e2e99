// Code points of UTF-8 text, their categories, and canonical composition.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "engine/tokenizer/unicode/unicode_tables.h"

namespace tandem::unicode {

constexpr uint32_t kReplacement = 0xfffd;

struct CodePoint {
  uint32_t value;
  uint32_t bytes;
};

/// First code point of `text`, which is not empty. A byte that begins no valid one is
/// U+FFFD of one byte.
CodePoint decode(std::string_view text);
void append(uint32_t code, std::string& text);
Category category(uint32_t code);
/// Bytes of white space that `text` begins or ends with.
size_t leading_space(std::string_view text);
size_t trailing_space(std::string_view text);
/// Whether the first or last character is one of words, \w of regular expressions: alphabetic, a
/// mark, a decimal digit, a connector or a joiner. Neither of an empty text is.
bool begins_with_word(std::string_view text);
bool ends_with_word(std::string_view text);
/// Normalization forms. Bytes that are not UTF-8 stay.
std::string to_nfc(std::string_view text);
std::string to_nfd(std::string_view text);
std::string to_nfkc(std::string_view text);
std::string to_nfkd(std::string_view text);
/// Each character in lower case, whatever stands next to it.
std::string to_lower(std::string_view text);
/// The text without combining marks.
std::string strip_accents(std::string_view text);
/// SentencePiece's "nmt" rules as tokenizers has them: without control characters, other white
/// space as spaces.
std::string to_nmt(std::string_view text);

}  // namespace tandem::unicode
