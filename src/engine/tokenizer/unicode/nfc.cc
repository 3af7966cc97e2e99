#include <algorithm>
#include <unordered_map>
#include <vector>

#include "engine/tokenizer/unicode/unicode.h"

namespace tandem::unicode {
namespace {

// Hangul syllables are composed by arithmetic.
constexpr uint32_t kSyllable = 0xac00, kLead = 0x1100, kVowel = 0x1161, kTrail = 0x11a7;
constexpr uint32_t kVowels = 21, kTrails = 28, kLeads = 19;
constexpr uint32_t kSyllables = kLeads * kVowels * kTrails;
constexpr uint32_t kNotUnicode = 0x110000;  // + byte

struct Composition {
  std::unordered_map<uint32_t, const Decomposition*> spec;
  std::unordered_map<uint64_t, uint32_t> wholes;
  std::unordered_map<uint32_t, uint8_t> classes;
};

uint64_t pair_key(uint32_t first, uint32_t second) {
  return uint64_t(first) << 32 | second;
}

const Composition& composition() {
  static const Composition tables = [] {
    Composition made;
    for (size_t i = 0; i < kNumDecompositions; ++i) {
      const Decomposition& d = kDecompositions[i];
      made.spec[d.code] = &d;
      const bool composes = std::find(kNotComposed, kNotComposed + kNumNotComposed, d.code) ==
                            kNotComposed + kNumNotComposed;
      if (d.second && composes) made.wholes[pair_key(d.first, d.second)] = d.code;
    }
    for (size_t i = 0; i + 1 < kNumCombiningRuns; ++i) {
      const auto value = uint8_t(kCombiningRuns[i] & 0xff);
      for (uint32_t c = kCombiningRuns[i] >> 8; value && c < kCombiningRuns[i + 1] >> 8; ++c) {
        made.classes[c] = value;
      }
    }
    return made;
  }();
  return tables;
}

uint8_t combining_class(uint32_t code) {
  if (code < 0x300) return 0;
  const auto found = composition().classes.find(code);
  return found == composition().classes.end() ? 0 : found->second;
}

void decompose_canonical(uint32_t code, std::vector<uint32_t>& out) {
  if (code - kSyllable < kSyllables) {
    const uint32_t index = code - kSyllable;
    out.push_back(kLead + index / (kVowels * kTrails));
    out.push_back(kVowel + index / kTrails % kVowels);
    if (index % kTrails) out.push_back(kTrail + index % kTrails);
    return;
  }
  const auto found = code < 0xc0 ? composition().spec.end() : composition().spec.find(code);
  if (found == composition().spec.end()) {
    out.push_back(code);
    return;
  }
  decompose_canonical(found->second->first, out);
  if (found->second->second) out.push_back(found->second->second);
}

using Texts = std::unordered_map<uint32_t, std::vector<uint32_t>>;

/// Whole compatibility decompositions of characters that differ from their canonical ones.
const Texts& compatibility() {
  static const Texts texts = [] {
    Texts made;
    for (size_t i = 0; i < kNumCompatibilityRuns; ++i) {
      const CompatibilityRun& run = kCompatibilityRuns[i];
      for (uint32_t at = 0; at < run.count; ++at) {
        made[run.code + at] = {run.target + at * run.step};
      }
    }
    for (size_t i = 0; i < kNumCompatibilityTexts;) {
      const uint32_t code = kCompatibilityTexts[i] >> 5, length = kCompatibilityTexts[i] & 31;
      const uint32_t* const first = kCompatibilityTexts + i + 1;
      made[code].assign(first, first + length);
      i += 1 + length;
    }
    return made;
  }();
  return texts;
}

void decompose(uint32_t code, bool is_compatible, std::vector<uint32_t>& out) {
  if (is_compatible && code >= 0xa0) {
    if (const auto found = compatibility().find(code); found != compatibility().end()) {
      out.insert(out.end(), found->second.begin(), found->second.end());
      return;
    }
  }
  decompose_canonical(code, out);
}

/// The character that the two become, 0 if none.
uint32_t compose(uint32_t first, uint32_t second) {
  if (first - kLead < kLeads && second - kVowel < kVowels) {
    return kSyllable + ((first - kLead) * kVowels + second - kVowel) * kTrails;
  }
  if (first - kSyllable < kSyllables && (first - kSyllable) % kTrails == 0 &&
      second - kTrail - 1 < kTrails - 1) {
    return first + second - kTrail;
  }
  const auto found = composition().wholes.find(pair_key(first, second));
  return found == composition().wholes.end() ? 0 : found->second;
}

void reorder(std::vector<uint32_t>& codes) {
  for (size_t begin = 0; begin < codes.size();) {
    if (combining_class(codes[begin]) == 0) {
      ++begin;
      continue;
    }
    size_t end = begin;
    while (end < codes.size() && combining_class(codes[end]) != 0) ++end;
    std::stable_sort(
        codes.begin() + long(begin), codes.begin() + long(end),
        [](uint32_t a, uint32_t b) { return combining_class(a) < combining_class(b); });
    begin = end;
  }
}

void compose_all(std::vector<uint32_t>& codes) {
  size_t starter = codes.size(), count = 0;
  int last_class = -1;  // of what follows the starter, -1 directly after it
  for (const uint32_t code : codes) {
    const int combining = combining_class(code);
    if (starter < count && last_class < combining) {
      if (const uint32_t whole = compose(codes[starter], code)) {
        codes[starter] = whole;
        continue;
      }
    }
    if (combining == 0) {
      starter = count;
      last_class = -1;
    } else {
      last_class = combining;
    }
    codes[count++] = code;
  }
  codes.resize(count);
}

/// `is_compatible`: forms KC and KD; `composes`: C and KC.
std::string to_form(std::string_view text, bool is_compatible, bool composes) {
  std::vector<uint32_t> codes;
  codes.reserve(text.size());
  for (size_t at = 0; at < text.size();) {
    const CodePoint next = decode(text.substr(at));
    const bool is_invalid = next.bytes == 1 && next.value == kReplacement;
    is_invalid ? codes.push_back(kNotUnicode + uint8_t(text[at]))
               : decompose(next.value, is_compatible, codes);
    at += next.bytes;
  }
  reorder(codes);
  if (composes) compose_all(codes);
  std::string result;
  result.reserve(text.size());
  for (const uint32_t code : codes) {
    code >= kNotUnicode ? result.push_back(char(code - kNotUnicode)) : append(code, result);
  }
  return result;
}

bool is_ascii(std::string_view text) {
  return std::ranges::all_of(text, [](char c) { return uint8_t(c) < 0x80; });
}

}  // namespace

std::string to_nfc(std::string_view text) {
  // Characters below U+0300 are composed and join only with marks above.
  if (std::ranges::all_of(text, [](char c) { return uint8_t(c) < 0xcc; })) return std::string(text);
  return to_form(text, false, true);
}

std::string to_nfd(std::string_view text) {
  return is_ascii(text) ? std::string(text) : to_form(text, false, false);
}

std::string to_nfkc(std::string_view text) {
  return is_ascii(text) ? std::string(text) : to_form(text, true, true);
}

std::string to_nfkd(std::string_view text) {
  return is_ascii(text) ? std::string(text) : to_form(text, true, false);
}

}  // namespace tandem::unicode
