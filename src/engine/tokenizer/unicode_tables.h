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

}  // namespace tandem::unicode
