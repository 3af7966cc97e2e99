#include "engine/tokenizer/unicode/character_map.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include "engine/tokenizer/unicode/unicode.h"
#include "tandem/error.h"

namespace tandem {
namespace {

/// Clusters of as many bytes or more are replaced by character.
constexpr size_t kLongCluster = 6;

/// Bounds the growth of a text; NFKC has 33 bytes.
constexpr size_t kMaxReplacement = 256;

struct CodeRange {
  uint32_t first, last;
};

// Grapheme_Cluster_Break of Unicode 16 where it does not follow from the category.
constexpr CodeRange kPrepended[] = {
    {0x600, 0x605},     {0x6dd, 0x6dd},     {0x70f, 0x70f},     {0x890, 0x891},
    {0x8e2, 0x8e2},     {0xd4e, 0xd4e},     {0x110bd, 0x110bd}, {0x110cd, 0x110cd},
    {0x111c2, 0x111c3}, {0x113d1, 0x113d1}, {0x1193f, 0x1193f}, {0x11941, 0x11941},
    {0x11a3a, 0x11a3a}, {0x11a84, 0x11a89}, {0x11d46, 0x11d46}, {0x11f02, 0x11f02}};
constexpr CodeRange kAttached[] = {{0xe33, 0xe33},   {0xeb3, 0xeb3},     {0x200c, 0x200d},
                                   {0xff9e, 0xff9f}, {0x1f3fb, 0x1f3ff}, {0xe0020, 0xe007f}};
constexpr CodeRange kNotAttached[] = {
    {0x102b, 0x102c}, {0x1038, 0x1038}, {0x1062, 0x1064},  {0x1067, 0x106d}, {0x1083, 0x1083},
    {0x1087, 0x108c}, {0x108f, 0x108f}, {0x109a, 0x109c},  {0x1a61, 0x1a61}, {0x1a63, 0x1a64},
    {0xaa7b, 0xaa7b}, {0xaa7d, 0xaa7d}, {0x11720, 0x11721}};

template <size_t N>
bool is_in(const CodeRange (&ranges)[N], uint32_t code) {
  return std::ranges::any_of(ranges,
                             [&](CodeRange r) { return r.first <= code && code <= r.last; });
}

enum class Break : uint8_t {
  other,
  control,
  prepended,
  attached,
  lead,
  vowel,
  trail,
  lv,
  lvt,
  flag
};

Break hangul_or_other(uint32_t code) {
  if ((code >= 0x1100 && code < 0x1160) || (code >= 0xa960 && code < 0xa97d)) return Break::lead;
  if ((code >= 0x1160 && code < 0x11a8) || (code >= 0xd7b0 && code < 0xd7c7)) return Break::vowel;
  if ((code >= 0x11a8 && code < 0x1200) || (code >= 0xd7cb && code < 0xd7fc)) return Break::trail;
  if (code >= 0xac00 && code < 0xd7a4) return (code - 0xac00) % 28 == 0 ? Break::lv : Break::lvt;
  return code >= 0x1f1e6 && code < 0x1f200 ? Break::flag : Break::other;
}

Break break_of(uint32_t code) {
  using enum unicode::Category;
  if (code >= 0x20 && code < 0x7f) return Break::other;
  if (is_in(kPrepended, code)) return Break::prepended;
  if (is_in(kAttached, code)) return Break::attached;
  const unicode::Category c = unicode::category(code);
  if (c == Mn || c == Me || (c == Mc && !is_in(kNotAttached, code))) return Break::attached;
  if (c == Zl || c == Zp || c == Cc || c == Cf || c == Space) return Break::control;
  return hangul_or_other(code);
}

bool follows_in_cluster(Break before, Break after) {
  if (before == Break::control || after == Break::control) return false;
  if (after == Break::attached || before == Break::prepended) return true;
  if (before == Break::lead) {
    return after == Break::lead || after == Break::vowel || after == Break::lv ||
           after == Break::lvt;
  }
  if (before == Break::vowel || before == Break::lv) {
    return after == Break::vowel || after == Break::trail;
  }
  return (before == Break::trail || before == Break::lvt) && after == Break::trail;
}

}  // namespace

size_t cluster_bytes(std::string_view text) {
  if (text.starts_with("\r\n")) return 2;
  const unicode::CodePoint first = unicode::decode(text);
  size_t at = first.bytes;
  int flags = 0;
  for (Break before = break_of(first.value); at < text.size();) {
    const unicode::CodePoint next = unicode::decode(text.substr(at));
    const Break after = break_of(next.value);
    flags = before == Break::flag ? flags + 1 : 0;
    const bool is_flag = after == Break::flag && flags == 1;
    if (!is_flag && !follows_in_cluster(before, after)) break;
    at += next.bytes;
    before = after;
  }
  return at;
}

CharacterMap::CharacterMap(std::string_view bytes) {
  const auto word = [&](size_t at) {
    uint32_t value = 0;
    for (size_t i = 0; i < 4; ++i) value |= uint32_t(uint8_t(bytes[at + i])) << 8 * i;
    return value;
  };
  const size_t size = bytes.size() < 4 ? 0 : word(0);
  if (size == 0 || size % 4 != 0 || size > bytes.size() - 4) {
    throw ConfigError(
        fmt::format("precompiled_charsmap has {} bytes and a trie of {}: expected a trie that fits",
                    bytes.size(), size));
  }
  units_.reserve(size / 4);
  for (size_t at = 4; at < 4 + size; at += 4) units_.push_back(word(at));
  replacements_ = bytes.substr(4 + size);
  if (!replacements_.ends_with('\0')) replacements_ += '\0';
  for (size_t at = 0; at < replacements_.size();) {
    const size_t length = replacements_.find('\0', at) - at;
    if (length > kMaxReplacement) {
      throw ConfigError(
          fmt::format("precompiled_charsmap has a text of {} bytes: expected at most {}", length,
                      kMaxReplacement));
    }
    at += length + 1;
  }
}

CharacterMap::Match CharacterMap::find(std::string_view text, bool takes_shortest) const {
  // A unit: bits 0 to 7 are the label, or with bit 31 bits 0 to 30 a value; bit 8 tells whether a
  // value follows; bits 10 on are the distance to its children, by bit 9 in units of 256.
  const auto distance = [](uint32_t unit) { return (unit >> 10) << ((unit & 1u << 9) >> 6); };
  Match match;
  uint32_t at = distance(units_[0]);
  for (size_t i = 0; i < text.size(); ++i) {
    at ^= uint8_t(text[i]);
    if (at >= units_.size() || (units_[at] & (1u << 31 | 0xff)) != uint8_t(text[i])) break;
    const bool has_value = (units_[at] >> 8 & 1) != 0;
    at ^= distance(units_[at]);
    if (!has_value) continue;
    const uint32_t value = at < units_.size() ? units_[at] & ~(1u << 31) : ~0u;
    if (value >= replacements_.size()) break;
    match = {i + 1, replacements_.data() + value};
    if (takes_shortest) break;
  }
  return match;
}

std::string CharacterMap::replace_clusters(std::string_view text) const {
  std::string result;
  while (!text.empty()) {
    const size_t cluster = cluster_bytes(text);
    const std::string_view whole = text.substr(0, cluster);
    text.remove_prefix(cluster);
    if (cluster < kLongCluster) {
      if (const Match match = find(whole, true); match.bytes > 0) {
        result += match.replacement;
        continue;
      }
    }
    for (size_t at = 0; at < cluster;) {
      const std::string_view character = whole.substr(at, unicode::decode(whole.substr(at)).bytes);
      const Match match = find(character, true);
      result += match.bytes > 0 ? match.replacement : character;
      at += character.size();
    }
  }
  return result;
}

}  // namespace tandem
