#include "engine/chat/jinja/jinja_case.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <string_view>
#include <unordered_map>

#include "engine/chat/jinja/jinja_value.h"
#include "engine/tokenizer/unicode/unicode.h"

namespace tandem::jinja {
namespace {

using unicode::Category;
using unicode::CodeRange;

constexpr uint32_t kSigma = 0x3a3, kDotlessI = 0x131, kCapitalSharpS = 0x1e9e;
constexpr CodeRange kCherokee[] = {{0x13a0, 0x13ff}, {0xab70, 0xabbf}};
constexpr const char* kFinalSigma = "\u03c2";

/// Upper case of letters that are lower case of no other, or have several letters.
constexpr struct {
  uint32_t code;
  const char* upper;
} kUpper[] = {{0xb5, "\u039c"},   {0xdf, "SS"},       {0x131, "I"},      {0x17f, "S"},
              {0x3c2, "\u03a3"},  {0x3d0, "\u0392"},  {0x3d1, "\u0398"}, {0x3d5, "\u03a6"},
              {0x3d6, "\u03a0"},  {0x3f0, "\u039a"},  {0x3f1, "\u03a1"}, {0x3f5, "\u0395"},
              {0x1e9b, "\u1e60"}, {0x1fbe, "\u0399"}, {0xfb00, "FF"},    {0xfb01, "FI"},
              {0xfb02, "FL"},     {0xfb03, "FFI"},    {0xfb04, "FFL"},   {0xfb05, "ST"},
              {0xfb06, "ST"}};
/// Characters whose upper case is not among these.
constexpr CodeRange kNoUpper[] = {
    {0x149, 0x149},   {0x1c5, 0x1c5},   {0x1c8, 0x1c8},   {0x1cb, 0x1cb},   {0x1f0, 0x1f0},
    {0x1f2, 0x1f2},   {0x345, 0x345},   {0x390, 0x390},   {0x3b0, 0x3b0},   {0x587, 0x587},
    {0x1c80, 0x1c8f}, {0x1e96, 0x1e9a}, {0x1f50, 0x1f50}, {0x1f52, 0x1f52}, {0x1f54, 0x1f54},
    {0x1f56, 0x1f56}, {0x1f80, 0x1faf}, {0x1fb2, 0x1fb4}, {0x1fb6, 0x1fb7}, {0x1fbc, 0x1fbc},
    {0x1fc2, 0x1fc4}, {0x1fc6, 0x1fc7}, {0x1fcc, 0x1fcc}, {0x1fd2, 0x1fd3}, {0x1fd6, 0x1fd7},
    {0x1fe2, 0x1fe4}, {0x1fe6, 0x1fe7}, {0x1ff2, 0x1ff4}, {0x1ff6, 0x1ff7}, {0x1ffc, 0x1ffc},
    {0xfb13, 0xfb17}};
/// Digraphs whose first letter alone is upper case in titles.
constexpr CodeRange kDigraphs[] = {{0x1c4, 0x1cc}, {0x1f1, 0x1f3}};
/// Georgian letters that are the same in titles.
constexpr CodeRange kSameInTitles[] = {{0x10d0, 0x10fa}, {0x10fd, 0x10ff}};
constexpr CodeRange kOtherUpper[] = {
    {0x2160, 0x216f}, {0x24b6, 0x24cf}, {0x1f130, 0x1f149}, {0x1f150, 0x1f169}, {0x1f170, 0x1f189}};
constexpr CodeRange kOtherLower[] = {
    {0xaa, 0xaa},       {0xba, 0xba},       {0x2b0, 0x2b8},     {0x2c0, 0x2c1},
    {0x2e0, 0x2e4},     {0x345, 0x345},     {0x37a, 0x37a},     {0x10fc, 0x10fc},
    {0x1d2c, 0x1d6a},   {0x1d78, 0x1d78},   {0x1d9b, 0x1dbf},   {0x2071, 0x2071},
    {0x207f, 0x207f},   {0x2090, 0x209c},   {0x2170, 0x217f},   {0x24d0, 0x24e9},
    {0x2c7c, 0x2c7d},   {0xa69c, 0xa69d},   {0xa770, 0xa770},   {0xa7f2, 0xa7f4},
    {0xa7f8, 0xa7f9},   {0xab5c, 0xab5f},   {0xab69, 0xab69},   {0x10780, 0x10780},
    {0x10783, 0x10785}, {0x10787, 0x107b0}, {0x107b2, 0x107ba}, {0x1e030, 0x1e06d}};

template <size_t n>
bool is_in(uint32_t code, const CodeRange (&ranges)[n]) {
  return std::ranges::any_of(
      ranges, [code](const CodeRange& range) { return code >= range.first && code <= range.last; });
}

template <size_t n>
bool is_of(uint32_t code, const Category (&categories)[n]) {
  return std::ranges::find(categories, unicode::category(code)) != std::end(categories);
}

bool is_upper(uint32_t code) {
  return unicode::category(code) == Category::Lu || is_in(code, kOtherUpper);
}
bool is_lower(uint32_t code) {
  return unicode::category(code) == Category::Ll || is_in(code, kOtherLower);
}
bool is_cased(uint32_t code) {
  return is_upper(code) || is_lower(code) || unicode::category(code) == Category::Lt;
}

uint32_t decode(std::string_view text) {
  return unicode::decode(text).value;
}

std::string lower_case(uint32_t code) {
  std::string text;
  unicode::append(code, text);
  return unicode::to_lower(text);
}

/// Upper case of the letters that are lower case of one.
const std::unordered_map<uint32_t, uint32_t>& upper_cases() {
  static const std::unordered_map<uint32_t, uint32_t> kTable = [] {
    std::unordered_map<uint32_t, uint32_t> table;
    for (size_t i = 0; i < unicode::kNumLowerRuns; ++i) {
      const unicode::LowerRun& run = unicode::kLowerRuns[i];
      for (uint32_t code = run.first; code <= run.last; code += run.step) {
        if (unicode::category(code) != Category::Lt) {
          table.try_emplace(uint32_t(int32_t(code) + run.delta), code);
        }
      }
    }
    return table;
  }();
  return kTable;
}

std::string upper_case(uint32_t code) {
  std::string text;
  unicode::append(code, text);
  for (const auto& [lower, upper] : kUpper) {
    if (lower == code) return upper;
  }
  if (is_in(code, kNoUpper)) fail(fmt::format("upper case of {}: expected another letter", text));
  const auto found = upper_cases().find(code);
  if (found == upper_cases().end()) return text;
  text.clear();
  unicode::append(found->second, text);
  return text;
}

std::string title_case(uint32_t code) {
  std::string text;
  unicode::append(code, text);
  if (is_in(code, kSameInTitles)) return text;
  if (is_in(code, kDigraphs)) fail(fmt::format("title case of {}: expected another letter", text));
  std::string upper = upper_case(code);
  const size_t first = unicode::decode(upper).bytes;
  return upper.size() == first ? upper : upper.substr(0, first) + lower(upper.substr(first));
}

bool is_ignored(uint32_t code) {
  using enum Category;
  constexpr Category kIgnored[] = {Mn, Me, Cf, Lm, Sk};
  constexpr std::u32string_view kMarks = U"'.:\u00b7\u2018\u2019\u2024\u2027";
  return is_of(code, kIgnored) || kMarks.find(char32_t(code)) != kMarks.npos;
}

/// Whether the sigma at `at` ends a word.
bool is_final(const std::vector<std::string>& all, size_t at) {
  const auto is_cased_letter = [&](size_t i) { return is_cased(decode(all[i])); };
  size_t before = at;
  while (before > 0 && is_ignored(decode(all[before - 1]))) --before;
  if (before == 0 || !is_cased_letter(before - 1)) return false;
  size_t after = at + 1;
  while (after < all.size() && is_ignored(decode(all[after]))) ++after;
  return after == all.size() || !is_cased_letter(after);
}

/// `change(code, i)`: what becomes of the character at i; a sigma that is to be lower case, and
/// ends a word, is another.
enum class Case : uint8_t { upper, lower, title };
template <typename Choose>
std::string change_each(const std::string& text, const Choose& choose) {
  const std::vector<std::string> all = characters(text);
  std::string result;
  for (size_t i = 0; i < all.size(); ++i) {
    const uint32_t code = decode(all[i]);
    const Case wanted = choose(code, i);
    if (wanted == Case::lower) {
      result += code == kSigma && is_final(all, i) ? kFinalSigma : lower_case(code);
    } else {
      result += wanted == Case::upper ? upper_case(code) : title_case(code);
    }
  }
  return result;
}

}  // namespace

std::string upper(const std::string& text) {
  return change_each(text, [](uint32_t, size_t) { return Case::upper; });
}

std::string lower(const std::string& text) {
  return change_each(text, [](uint32_t, size_t) { return Case::lower; });
}

std::string casefold(const std::string& text) {
  std::string folded;
  for (const std::string& each : characters(text)) {
    const uint32_t code = decode(each);
    if (is_in(code, kCherokee)) fail(fmt::format("casefold of {}: expected another letter", each));
    const bool is_same = code == kDotlessI || !(is_lower(code) || code == kCapitalSharpS);
    for (const std::string& upper : characters(is_same ? each : upper_case(code))) {
      folded += code == kDotlessI ? each : lower_case(decode(upper));
    }
  }
  return folded;
}

std::string swap_case(const std::string& text) {
  return change_each(
      text, [](uint32_t code, size_t) { return is_upper(code) ? Case::lower : Case::upper; });
}

std::string capitalize(const std::string& text) {
  return change_each(text, [](uint32_t, size_t i) { return i == 0 ? Case::title : Case::lower; });
}

std::string title(const std::string& text) {
  bool after_letter = false;
  return change_each(text, [&](uint32_t code, size_t) {
    const Case wanted = after_letter ? Case::lower : Case::title;
    after_letter = is_cased(code);
    return wanted;
  });
}

std::string title_words(const std::string& text) {
  std::string result;
  std::string word;
  bool is_divider = false;  // the word
  const auto end_word = [&] {
    const size_t first = word.empty() ? 0 : unicode::decode(word).bytes;
    result += upper(word.substr(0, first)) + lower(word.substr(first));
    word.clear();
  };
  for (const std::string& each : characters(text)) {
    const bool divides =
        leading_space(each) > 0 || std::string_view("-({[<").find(each) != std::string_view::npos;
    if (!word.empty() && divides != is_divider) end_word();
    is_divider = divides;
    word += each;
  }
  end_word();
  return result;
}

bool has_case(const std::string& text, bool wants_upper) {
  bool has_letter = false;
  for (const std::string& each : characters(text)) {
    const uint32_t code = decode(each);
    if (!is_cased(code)) continue;
    if (!(wants_upper ? is_upper(code) : is_lower(code))) return false;
    has_letter = true;
  }
  return has_letter;
}

bool consists_of(const std::string& text, Letters letters) {
  using enum Category;
  constexpr Category kLetters[] = {Lu, Ll, Lt, Lm, Lo}, kNumbers[] = {Nd, Nl, No};
  const bool has_letters = letters == Letters::isalpha || letters == Letters::isalnum;
  const bool has_numbers = letters == Letters::isalnum;
  const bool is_value = letters == Letters::isdigit || letters == Letters::isnumeric;
  for (const std::string& each : characters(text)) {
    const uint32_t code = decode(each);
    const bool is_decimal = unicode::category(code) == Nd;
    const bool is_number = is_of(code, kNumbers), is_letter = is_of(code, kLetters);
    const bool is_unclear = (is_number && !is_decimal) || unicode::category(code) == Lo;
    if (is_value && is_unclear) fail(fmt::format("number {}: expected decimal digits", each));
    const bool fits = (has_letters && is_letter) || (has_numbers && is_number) ||
                      (letters != Letters::isalpha && is_decimal);
    if (!fits) return false;
  }
  return !text.empty();
}

}  // namespace tandem::jinja
