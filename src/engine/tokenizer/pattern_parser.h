// Syntax tree of a regular expression.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "engine/tokenizer/pattern.h"

namespace tandem {

/// Alternatives of sequences of terms.
struct PatternTree {
  struct Term {
    enum class Kind : uint8_t { set, group, ahead, not_ahead };
    Kind kind = Kind::set;
    bool is_possessive = false;
    uint32_t min = 1, max = 1;  ///< kPatternUnbounded: no limit
    CharSet set;
    std::vector<PatternTree> group;  ///< one, unless a set
  };
  std::vector<std::vector<Term>> alternatives;
};
constexpr uint32_t kPatternUnbounded = ~uint32_t(0);

/// Throws ConfigError as Pattern's constructor.
PatternTree parse_pattern(std::string_view regex);

}  // namespace tandem
