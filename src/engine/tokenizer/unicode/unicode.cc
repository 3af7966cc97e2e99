#include "engine/tokenizer/unicode/unicode.h"

#include <algorithm>
#include <iterator>
#include <vector>

namespace tandem::unicode {
namespace {

constexpr uint32_t kEnd = 0x110000;

std::vector<Category> make_categories() {
  std::vector<Category> table(kEnd, Category::Cn);
  for (size_t i = 0; i < kNumCategoryRuns; ++i) {
    const uint32_t end = i + 1 < kNumCategoryRuns ? kCategoryRuns[i + 1] >> 8 : kEnd;
    for (uint32_t code = kCategoryRuns[i] >> 8; code < end; ++code) {
      table[code] = Category(kCategoryRuns[i] & 0xff);
    }
  }
  return table;
}

bool is_space(Category category) {
  return category == Category::Space || category == Category::Zs || category == Category::Zl ||
         category == Category::Zp;
}

bool is_continuation(char byte) {
  return (uint8_t(byte) & 0xc0) == 0x80;
}

/// Begin of the last character of `text`, which is not empty.
size_t last_begin(std::string_view text) {
  size_t begin = text.size() - 1;
  while (begin > 0 && text.size() - begin < 4 && is_continuation(text[begin])) --begin;
  return begin + decode(text.substr(begin)).bytes == text.size() ? begin : text.size() - 1;
}

bool is_word(uint32_t code) {
  using enum Category;
  constexpr Category kWord[] = {Lu, Ll, Lt, Lm, Lo, Mn, Mc, Me, Nd, Nl, Pc};
  constexpr CodeRange kMore[] = {// joiners, and letters in circles and squares
                                 {0x200c, 0x200d},
                                 {0x24b6, 0x24e9},
                                 {0x1f130, 0x1f149},
                                 {0x1f150, 0x1f169},
                                 {0x1f170, 0x1f189}};
  return std::ranges::find(kWord, category(code)) != std::end(kWord) ||
         std::ranges::any_of(kMore, [code](const CodeRange& range) {
           return code >= range.first && code <= range.last;
         });
}

}  // namespace

bool begins_with_word(std::string_view text) {
  return !text.empty() && is_word(decode(text).value);
}

bool ends_with_word(std::string_view text) {
  return !text.empty() && is_word(decode(text.substr(last_begin(text))).value);
}

CodePoint decode(std::string_view text) {
  const auto byte = [&](size_t i) { return uint32_t(uint8_t(text[i])); };
  const uint32_t first = byte(0);
  if (first < 0x80) return {first, 1};
  const uint32_t bytes = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  if (first < 0xc2 || first > 0xf4 || text.size() < bytes) return {kReplacement, 1};
  uint32_t code = first & (0x7f >> bytes);
  for (uint32_t i = 1; i < bytes; ++i) {
    if (!is_continuation(text[i])) return {kReplacement, 1};
    code = code << 6 | (byte(i) & 0x3f);
  }
  const bool is_short = (bytes == 3 && code < 0x800) || (bytes == 4 && code < 0x10000);
  if (is_short || code >= kEnd || (code >= 0xd800 && code < 0xe000)) return {kReplacement, 1};
  return {code, bytes};
}

void append(uint32_t code, std::string& text) {
  if (code < 0x80) {
    text += char(code);
    return;
  }
  const int more = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
  text += char((0xff00u >> (more + 1) & 0xff) | code >> (6 * more));
  for (int i = more - 1; i >= 0; --i) text += char(0x80 | (code >> (6 * i) & 0x3f));
}

Category category(uint32_t code) {
  static const std::vector<Category> table = make_categories();
  return table[code];
}

size_t leading_space(std::string_view text) {
  size_t at = 0;
  while (at < text.size()) {
    const CodePoint next = decode(text.substr(at));
    if (!is_space(category(next.value))) break;
    at += next.bytes;
  }
  return at;
}

size_t trailing_space(std::string_view text) {
  size_t at = text.size();
  while (at > 0) {
    const size_t begin = last_begin(text.substr(0, at));
    if (!is_space(category(decode(text.substr(begin, at - begin)).value))) break;
    at = begin;
  }
  return text.size() - at;
}

}  // namespace tandem::unicode
