#include "engine/tokenizer/text_decoder.h"

#include "engine/tokenizer/unicode/unicode.h"

namespace tandem {
namespace {

struct Prefix {
  size_t bytes;   ///< of the longest begin of a character, at least 1
  bool is_wrong;  ///< rather than continued by bytes to come
};

/// Begin of a character that is not valid as a whole.
Prefix incomplete_prefix(std::string_view text) {
  const auto byte = [&](size_t i) { return uint8_t(text[i]); };
  const uint8_t first = byte(0);
  const size_t length = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  if (first < 0xc2 || first > 0xf4) return {1, true};
  for (size_t i = 1; i < length; ++i) {
    if (i == text.size()) return {i, false};
    const uint8_t low = i > 1 ? 0x80 : first == 0xe0 ? 0xa0 : first == 0xf0 ? 0x90 : 0x80;
    const uint8_t high = i > 1 ? 0xbf : first == 0xed ? 0x9f : first == 0xf4 ? 0x8f : 0xbf;
    if (byte(i) < low || byte(i) > high) return {i, true};
  }
  return {length, true};
}

}  // namespace

std::string Utf8Stream::add(std::string_view bytes) {
  pending_ += bytes;
  std::string text;
  std::string_view left = pending_;
  while (!left.empty()) {
    const unicode::CodePoint next = unicode::decode(left);
    if (next.bytes > 1 || uint8_t(left[0]) < 0x80) {
      text += left.substr(0, next.bytes);
      left.remove_prefix(next.bytes);
      continue;
    }
    const Prefix prefix = incomplete_prefix(left);
    if (!prefix.is_wrong) break;
    unicode::append(unicode::kReplacement, text);
    left.remove_prefix(prefix.bytes);
  }
  pending_.erase(0, pending_.size() - left.size());
  return text;
}

std::string Utf8Stream::rest() {
  std::string text;
  if (!pending_.empty()) unicode::append(unicode::kReplacement, text);
  pending_.clear();
  return text;
}

std::string TextDecoder::add(int32_t token) {
  std::string bytes;
  tokenizer_.decode(token, skips_special_, is_begin_, bytes);
  return stream_.add(bytes);
}

}  // namespace tandem
