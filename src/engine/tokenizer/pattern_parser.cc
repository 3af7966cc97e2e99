#include "engine/tokenizer/pattern_parser.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <utility>

#include "core/system/printable.h"
#include "engine/tokenizer/unicode/unicode.h"
#include "tandem/error.h"

namespace tandem {
namespace {

constexpr uint32_t kMaxCount = 1000;
constexpr int kMaxDepth = 20;
constexpr uint32_t kAllCategories = (uint32_t(1) << unicode::kNumCategories) - 1;

constexpr std::string_view kCategoryNames[] = {
    "Lu", "Ll", "Lt", "Lm", "Lo", "Mn", "Mc", "Me", "Nd", "Nl", "No", "Pc", "Pd", "Ps", "Pe",
    "Pi", "Pf", "Po", "Sm", "Sc", "Sk", "So", "Zs", "Zl", "Zp", "Cc", "Cf", "Cs", "Co", "Cn"};

uint32_t category_bit(unicode::Category category) {
  return uint32_t(1) << int(category);
}

/// Categories with this name or first letter, 0 if there are none.
uint32_t categories_named(std::string_view name) {
  uint32_t mask = 0;
  for (size_t i = 0; i < std::size(kCategoryNames); ++i) {
    if (kCategoryNames[i] == name || kCategoryNames[i].substr(0, 1) == name) mask |= 1u << i;
  }
  if (mask & category_bit(unicode::Category::Cc)) mask |= category_bit(unicode::Category::Space);
  return mask;
}

uint32_t space_categories() {
  return categories_named("Z") | category_bit(unicode::Category::Space);
}

void add_categories(CharSet& set, uint32_t mask) {
  set.categories |= mask;
  for (uint32_t code = 0; code < 128; ++code) {
    if (mask >> int(unicode::category(code)) & 1) set.ascii.set(code);
  }
}

void add_range(CharSet& set, uint32_t first, uint32_t last) {
  for (uint32_t code = first; code <= last && code < 128; ++code) set.ascii.set(code);
  if (last >= 128) set.ranges.push_back({std::max(first, 128u), last});
}

/// Adds the other case of ASCII letters, and the two characters that fold to one.
void ignore_case(CharSet& set) {
  for (uint32_t upper = 'A'; upper <= 'Z'; ++upper) {
    const uint32_t lower = upper + 32;
    if (!set.ascii[upper] && !set.ascii[lower]) continue;
    set.ascii.set(upper), set.ascii.set(lower);
    if (lower == 's') add_range(set, 0x17f, 0x17f);
    if (lower == 'k') add_range(set, 0x212a, 0x212a);
  }
}

void negate(CharSet& set) {
  set.is_negated = true;
  set.ascii.flip();
}

}  // namespace

class PatternParser {
 public:
  explicit PatternParser(std::string_view regex) : regex_(regex) {}

  PatternTree parse() {
    if (take("(?i)")) ignores_case_ = true;
    PatternTree tree = parse_alternatives(0);
    if (!ended()) fail("an unmatched )");
    return tree;
  }

 private:
  using Term = PatternTree::Term;

  [[noreturn]] void fail(std::string_view what) const {
    throw ConfigError(fmt::format("pattern {}: {} at byte {} is not supported",
                                  printable(regex_, 200), what, at_));
  }
  bool ended() const { return at_ >= regex_.size(); }
  char peek() const { return ended() ? '\0' : regex_[at_]; }
  bool take(std::string_view text) {
    if (!regex_.substr(at_).starts_with(text)) return false;
    at_ += text.size();
    return true;
  }
  uint32_t take_code() {
    if (ended()) fail("the end");
    const unicode::CodePoint next = unicode::decode(regex_.substr(at_));
    at_ += next.bytes;
    return next.value;
  }

  PatternTree parse_alternatives(int depth) {
    if (depth > kMaxDepth) fail("so deep a group");
    PatternTree tree;
    do {
      auto& terms = tree.alternatives.emplace_back();
      while (!ended() && peek() != '|' && peek() != ')') terms.push_back(parse_term(depth));
    } while (take("|"));
    return tree;
  }

  Term parse_term(int depth) {
    Term term = peek() == '(' ? parse_group(depth) : parse_set();
    parse_count(term);
    const bool is_set = term.kind == Term::Kind::set;
    const bool is_look = !is_set && term.kind != Term::Kind::group;
    if (is_look && (term.min != 1 || term.max != 1)) fail("a repeated lookahead");
    if (!is_set && term.is_possessive) fail("a possessive group");
    if (!is_set && (term.max > 8)) fail("a group repeated without limit, or more than 8 times,");
    return term;
  }

  Term parse_group(int depth) {
    Term term;
    const bool outer = ignores_case_;
    if (take("(?:")) {
      term.kind = Term::Kind::group;
    } else if (take("(?i:")) {
      term.kind = Term::Kind::group;
      ignores_case_ = true;
    } else if (take("(?=")) {
      term.kind = Term::Kind::ahead;
    } else if (take("(?!")) {
      term.kind = Term::Kind::not_ahead;
    } else if (regex_.substr(at_).starts_with("(?")) {
      fail("the group " + printable(regex_.substr(at_, 4)));
    } else {
      ++at_;
      term.kind = Term::Kind::group;
    }
    term.group.push_back(parse_alternatives(depth + 1));
    ignores_case_ = outer;
    if (!take(")")) fail("a group without )");
    return term;
  }

  void parse_count(Term& term) {
    const bool is_braced = peek() == '{';
    if (take("?")) {
      term.min = 0;
    } else if (take("*")) {
      term.min = 0, term.max = kPatternUnbounded;
    } else if (take("+")) {
      term.max = kPatternUnbounded;
    } else if (take("{")) {
      term.min = term.max = parse_number();
      if (take(",")) term.max = peek() == '}' ? kPatternUnbounded : parse_number();
      if (!take("}") || term.max < term.min || term.max == 0) fail("the count");
    } else {
      return;
    }
    if (peek() == '+' && !is_braced) {
      ++at_;
      term.is_possessive = true;
    } else if (peek() == '?' || peek() == '*' || peek() == '+' || peek() == '{') {
      fail("a second count");
    }
  }

  uint32_t parse_number() {
    if (peek() < '0' || peek() > '9') fail("a count without a number");
    uint32_t value = 0;
    while (peek() >= '0' && peek() <= '9') {
      value = value * 10 + uint32_t(regex_[at_++] - '0');
      if (value > kMaxCount) fail("so large a count");
    }
    return value;
  }

  Term parse_set() {
    Term term;
    if (take("[")) {
      term.set = parse_class();
    } else if (peek() == '\\') {
      parse_escape(term.set);
    } else if (take(".")) {
      add_range(term.set, '\n', '\n');
      negate(term.set);
      return term;
    } else {
      if (std::string_view("^$*+?{}").find(peek()) != std::string_view::npos) {
        fail(std::string(1, peek()));
      }
      const uint32_t code = take_code();
      add_range(term.set, code, code);
    }
    if (!ignores_case_) return term;
    if (term.set.categories == 0 && !term.set.ranges.empty()) fail("(?i) with such characters");
    if (!term.set.is_negated) ignore_case(term.set);
    return term;
  }

  CharSet parse_class() {
    CharSet set;
    const bool is_negated = take("^");
    bool is_first = true;
    while (is_first || peek() != ']') {
      is_first = false;
      if (ended() || peek() == '[' || regex_.substr(at_).starts_with("&&")) fail("such a class");
      uint32_t first;
      if (peek() == '\\') {
        const std::pair<bool, uint32_t> escaped = parse_escape(set);
        if (!escaped.first) continue;
        first = escaped.second;
      } else {
        first = take_code();
      }
      uint32_t last = first;
      if (peek() == '-' && at_ + 1 < regex_.size() && regex_[at_ + 1] != ']') {
        ++at_;
        CharSet end;
        const auto escaped = peek() == '\\' ? parse_escape(end) : std::pair{true, take_code()};
        last = escaped.second;
        if (!escaped.first || last < first) fail("the range");
      }
      add_range(set, first, last);
    }
    ++at_;
    if (is_negated && ignores_case_) fail("a negated class in (?i)");
    if (is_negated) negate(set);
    return set;
  }

  /// Adds what an escape means to `set`; {true, the character} if it is one.
  std::pair<bool, uint32_t> parse_escape(CharSet& set) {
    ++at_;
    const uint32_t code = take_code();
    if (code == 's' || code == 'S') {
      add_categories(set, code == 's' ? space_categories() : kAllCategories & ~space_categories());
      return {false, 0};
    }
    if (code == 'd' || code == 'D') {
      const uint32_t digits = categories_named("Nd");
      add_categories(set, code == 'd' ? digits : kAllCategories & ~digits);
      return {false, 0};
    }
    if (code == 'p' || code == 'P') {
      if (!take("{")) fail("\\p without {");
      const bool is_negated = (code == 'P') != take("^");
      const size_t end = regex_.find('}', at_);
      const std::string_view name = regex_.substr(at_, end == regex_.npos ? 0 : end - at_);
      const uint32_t mask = categories_named(name);
      if (mask == 0) fail(fmt::format("\\p{{{}}}", printable(name)));
      add_categories(set, is_negated ? kAllCategories & ~mask : mask);
      at_ = end + 1;
      return {false, 0};
    }
    const uint32_t character =
        code == 'x' || code == 'u' ? parse_hex(code == 'u') : escaped_character(code);
    add_range(set, character, character);
    return {true, character};
  }

  uint32_t escaped_character(uint32_t code) const {
    if (code == 'n') return '\n';
    if (code == 'r') return '\r';
    if (code == 't') return '\t';
    if (code == 'f') return '\f';
    if (code == 'v') return '\v';
    const bool is_word =
        code >= 128 || (code >= '0' && code <= '9') || ((code | 32) >= 'a' && (code | 32) <= 'z');
    if (is_word)
      fail(fmt::format("the escape \\{}", code < 128 ? std::string(1, char(code)) : "?"));
    return code;
  }

  uint32_t parse_hex(bool is_four) {
    const bool is_braced = !is_four && take("{");
    uint32_t value = 0;
    size_t digits = 0;
    const size_t max_digits = is_four ? 4 : is_braced ? 6 : 2;
    for (; digits < max_digits; ++digits, ++at_) {
      const char c = peek();
      const int lower = c | 32;
      if (c >= '0' && c <= '9')
        value = value * 16 + uint32_t(c - '0');
      else if (lower >= 'a' && lower <= 'f')
        value = value * 16 + uint32_t(lower - 'a' + 10);
      else
        break;
    }
    if (digits == 0 || (is_four && digits != 4) || (is_braced && !take("}")) || value > 0x10ffff) {
      fail("the hexadecimal escape");
    }
    return value;
  }

  std::string_view regex_;
  size_t at_ = 0;
  bool ignores_case_ = false;
};

PatternTree parse_pattern(std::string_view regex) {
  return PatternParser(regex).parse();
}

}  // namespace tandem
