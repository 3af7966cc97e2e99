// Regular expressions that divide text into words before byte-pair encoding. Matches are those of a
// backtracking engine that takes the first alternative that matches, as Oniguruma does, over the
// characters of Unicode 16.
//
// Supported: characters, escapes, classes [...] with ranges, \s \d \p{L} \p{Lu} and their
// complements, groups (?:...) and (?i:...), alternatives, ? * + {n} {n,} {n,m} (of one character
// if unbounded), possessive ?+ *+ ++, and lookahead (?=...) (?!...).
#pragma once

#include <bitset>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

namespace tandem {

/// Set of characters.
struct CharSet {
  std::bitset<128> ascii;
  uint32_t categories = 0;                            ///< bit by unicode::Category
  std::vector<std::pair<uint32_t, uint32_t>> ranges;  ///< first and last, inclusive
  bool is_negated = false;

  bool contains(uint32_t code) const { return code < 128 ? ascii[code] : contains_other(code); }

 private:
  bool contains_other(uint32_t code) const;
};

class Pattern {
 public:
  /// Throws ConfigError for what is not supported, naming it and its position, and for a pattern
  /// that matches the empty text.
  explicit Pattern(std::string_view regex);
  /// Pattern that matches this text.
  static Pattern literal(std::string_view text);

  /// Length in bytes of the match that begins at `at`, 0 if there is none. Throws InvalidArgument
  /// if the search takes too long.
  size_t match(std::string_view text, size_t at) const;

 private:
  class Compiler;
  static constexpr int kAccept = -1;
  enum class Kind : uint8_t { set, either, ahead, not_ahead };
  struct Node {
    Kind kind = Kind::set;
    bool is_possessive = false;
    int set = 0;  ///< Kind::set: repeated min to max times
    uint32_t min = 1, max = 1;
    int next = kAccept;             ///< not of `either`
    std::vector<int> alternatives;  ///< of `either`: in order; of the lookaheads: one
  };
  using FirstBytes = std::bitset<256>;
  struct Alternative {
    int node;
    FirstBytes first;
  };

  /// Bytes that a match can begin with, by node, and whether it can be empty.
  struct Begin {
    FirstBytes first;
    bool is_empty = false;
  };
  std::vector<Begin> find_begins() const;
  size_t run(int node, std::string_view text, size_t at, uint64_t& budget) const;
  size_t run_set(const Node& node, std::string_view text, size_t at, uint64_t& budget) const;

  std::vector<CharSet> sets_;
  std::vector<Node> nodes_;
  std::vector<Alternative> alternatives_;
  FirstBytes first_;
};

}  // namespace tandem
