// Tables of Unicode, written by tools/unicode_tables.py: general categories of version 16, and
// canonical decompositions and combining classes of version 9, as Hugging Face's tokenizers has.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tandem::unicode {

/// General categories. `Space`: control characters that are white space (U+0009 to U+000D, U+0085).
enum class Category : uint8_t {
  Lu,
  Ll,
  Lt,
  Lm,
  Lo,
  Mn,
  Mc,
  Me,
  Nd,
  Nl,
  No,
  Pc,
  Pd,
  Ps,
  Pe,
  Pi,  // clang-format off
  Pf, Po, Sm, Sc, Sk, So, Zs, Zl, Zp, Cc, Cf, Cs, Co, Cn, Space,  // clang-format on
};
constexpr int kNumCategories = 31;

/// Sorted; code point << 8 | value that holds up to the next run.
extern const uint32_t kCategoryRuns[];
extern const size_t kNumCategoryRuns;
extern const uint32_t kCombiningRuns[];
extern const size_t kNumCombiningRuns;

/// Canonical decomposition of `code`; `second` is 0 if it has one part.
struct Decomposition {
  uint32_t code, first, second = 0;
};
extern const Decomposition kDecompositions[];
extern const size_t kNumDecompositions;
/// Characters of two parts that do not become them again.
extern const uint32_t kNotComposed[];
extern const size_t kNumNotComposed;

/// Runs of compatibility decompositions to one character each: `count` characters from `code`
/// become those from `target`, `step` apart. Sorted.
struct CompatibilityRun {
  uint32_t code, count, target, step;
};
extern const CompatibilityRun kCompatibilityRuns[];
extern const size_t kNumCompatibilityRuns;
/// Longer ones: code point << 5 | length, then the characters. Sorted by code point.
extern const uint32_t kCompatibilityTexts[];
extern const size_t kNumCompatibilityTexts;

/// Characters `step` apart from `first` to `last` whose lower case is `delta` away. Sorted.
struct LowerRun {
  uint32_t first, last, step;
  int32_t delta;
};
extern const LowerRun kLowerRuns[];
extern const size_t kNumLowerRuns;

/// Sorted ranges, inclusive.
struct CodeRange {
  uint32_t first, last;
};
extern const CodeRange kAccents[];
extern const size_t kNumAccents;
extern const CodeRange kPunctuation[];
extern const size_t kNumPunctuation;

}  // namespace tandem::unicode
