// Changes of a text character by character.
#include <algorithm>
#include <unordered_map>

#include "engine/tokenizer/unicode/unicode.h"

namespace tandem::unicode {
namespace {

/// Appends what `change` makes of each character; bytes that are not UTF-8 stay.
template <typename Change>
std::string change_each(std::string_view text, const Change& change) {
  std::string result;
  result.reserve(text.size());
  for (size_t at = 0; at < text.size();) {
    const CodePoint next = decode(text.substr(at));
    const bool is_invalid = next.bytes == 1 && next.value == kReplacement;
    is_invalid ? result.push_back(text[at]) : change(next.value, result);
    at += next.bytes;
  }
  return result;
}

const std::unordered_map<uint32_t, uint32_t>& lower_cases() {
  static const std::unordered_map<uint32_t, uint32_t> table = [] {
    std::unordered_map<uint32_t, uint32_t> made;
    for (size_t i = 0; i < kNumLowerRuns; ++i) {
      const LowerRun& run = kLowerRuns[i];
      for (uint32_t code = run.first; code <= run.last; code += run.step) {
        made[code] = uint32_t(int32_t(code) + run.delta);
      }
    }
    return made;
  }();
  return table;
}

bool is_accent(uint32_t code) {
  if (code < 0x300) return false;
  const CodeRange* const end = kAccents + kNumAccents;
  const CodeRange* const found = std::lower_bound(
      kAccents, end, code, [](CodeRange range, uint32_t value) { return range.last < value; });
  return found != end && found->first <= code;
}

enum class Nmt : uint8_t { stays, space, none };

/// Rules of tokenizers' Nmt.
Nmt nmt_of(uint32_t code) {
  const bool is_control = (code > 0 && code < 0x20) || code == 0x7f || code == 0x8f || code == 0x9f;
  if (code == 9 || code == 10 || code == 12 || code == 13) return Nmt::space;
  if (is_control) return Nmt::none;
  const bool is_space = code == 0x1680 || (code >= 0x200b && code <= 0x200f) || code == 0x2028 ||
                        code == 0x2029 || code == 0x2581 || code == 0xfeff || code == 0xfffd;
  return is_space ? Nmt::space : Nmt::stays;
}

}  // namespace

std::string to_lower(std::string_view text) {
  constexpr uint32_t kDottedI = 0x130, kDotAbove = 0x307;
  return change_each(text, [](uint32_t code, std::string& to) {
    if (code < 0x80) {
      to.push_back(code >= 'A' && code <= 'Z' ? char(code + 32) : char(code));
    } else if (code == kDottedI) {
      to += 'i';
      append(kDotAbove, to);
    } else {
      const auto found = lower_cases().find(code);
      append(found == lower_cases().end() ? code : found->second, to);
    }
  });
}

std::string strip_accents(std::string_view text) {
  return change_each(text, [](uint32_t code, std::string& to) {
    if (!is_accent(code)) append(code, to);
  });
}

std::string to_nmt(std::string_view text) {
  return change_each(text, [](uint32_t code, std::string& to) {
    const Nmt change = nmt_of(code);
    if (change == Nmt::space) to += ' ';
    if (change == Nmt::stays) append(code, to);
  });
}

}  // namespace tandem::unicode
