#include "engine/tokenizer/unicode/byte_characters.h"

#include <array>

#include "engine/tokenizer/unicode/unicode.h"

namespace tandem {
namespace {

/// By code point below 324: its byte, -1 if none.
std::array<int16_t, 324> make_bytes() {
  std::array<int16_t, 324> bytes;
  bytes.fill(-1);
  size_t next = 256;
  for (size_t byte = 0; byte < 256; ++byte) {
    const bool is_printable = (byte > 0x20 && byte < 0x7f) || (byte > 0xa0 && byte != 0xad);
    bytes[is_printable ? byte : next++] = int16_t(byte);
  }
  return bytes;
}

int hex_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  const int lower = c | 32;
  return lower >= 'a' && lower <= 'f' ? lower - 'a' + 10 : -1;
}

}  // namespace

std::optional<std::string> bytes_of_characters(std::string_view text) {
  static const std::array<int16_t, 324> kBytes = make_bytes();
  std::string result;
  for (size_t at = 0; at < text.size();) {
    const unicode::CodePoint next = unicode::decode(text.substr(at));
    if (next.value >= kBytes.size() || kBytes[next.value] < 0) return std::nullopt;
    result += char(kBytes[next.value]);
    at += next.bytes;
  }
  return result;
}

std::optional<uint8_t> byte_of_token(std::string_view text) {
  if (text.size() != 6 || !text.starts_with("<0x") || text[5] != '>') return std::nullopt;
  const int high = hex_digit(text[3]), low = hex_digit(text[4]);
  if (high < 0 || low < 0) return std::nullopt;
  return uint8_t(high * 16 + low);
}

std::optional<std::string> bytes_of_base64(std::string_view text) {
  constexpr std::string_view kDigits =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  if (text.empty() || text.size() % 4 != 0) return std::nullopt;
  const size_t padding = text.ends_with("==") ? 2 : text.ends_with("=") ? 1 : 0;
  std::string result;
  uint32_t bits = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const size_t digit = i < text.size() - padding ? kDigits.find(text[i]) : 0;
    if (digit == kDigits.npos) return std::nullopt;
    bits = bits << 6 | uint32_t(digit);
    if (i % 4 != 3) continue;
    for (const int shift : {16, 8, 0}) result += char(bits >> shift & 0xff);
    bits = 0;
  }
  result.erase(result.size() - padding);
  return result;
}

std::string replace_all(std::string_view text, std::string_view from, std::string_view to) {
  std::string result;
  result.reserve(text.size());
  size_t begin = 0;
  for (size_t at = text.find(from); at != text.npos; at = text.find(from, begin)) {
    result.append(text.substr(begin, at - begin)).append(to);
    begin = at + from.size();
  }
  return result.append(text.substr(begin));
}

}  // namespace tandem
