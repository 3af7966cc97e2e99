#include "engine/tokenizer/pattern.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/system/printable.h"
#include "engine/tokenizer/pattern_parser.h"
#include "engine/tokenizer/unicode/unicode.h"
#include "tandem/error.h"

namespace tandem {
namespace {

constexpr size_t kMaxNodes = 4096;
constexpr size_t kNoMatch = std::string_view::npos;

size_t previous_character(std::string_view text, size_t at) {
  size_t begin = at - 1;
  while (begin > 0 && at - begin < 4 && (uint8_t(text[begin]) & 0xc0) == 0x80) --begin;
  return begin + unicode::decode(text.substr(begin)).bytes == at ? begin : at - 1;
}

}  // namespace

bool CharSet::contains_other(uint32_t code) const {
  bool found = categories >> int(unicode::category(code)) & 1;
  for (size_t i = 0; !found && i < ranges.size(); ++i) {
    found = code >= ranges[i].first && code <= ranges[i].second;
  }
  return found != is_negated;
}

/// Nodes are added after those that follow them in a match, and so have larger numbers.
class Pattern::Compiler {
 public:
  explicit Compiler(Pattern& pattern) : pattern_(pattern) {}

  int compile(const PatternTree& tree, int next) {
    if (tree.alternatives.size() == 1) return compile(tree.alternatives[0], next);
    Node node;
    node.kind = Kind::either;
    for (const auto& terms : tree.alternatives) node.alternatives.push_back(compile(terms, next));
    return add(std::move(node));
  }

  int compile(const std::vector<PatternTree::Term>& terms, int next) {
    for (auto term = terms.rbegin(); term != terms.rend(); ++term) next = compile(*term, next);
    return next;
  }

 private:
  int compile(const PatternTree::Term& term, int next) {
    Node node;
    node.next = next;
    switch (term.kind) {
      case PatternTree::Term::Kind::set:
        node.is_possessive = term.is_possessive;
        node.min = term.min, node.max = term.max;
        node.set = int(pattern_.sets_.size());
        pattern_.sets_.push_back(term.set);
        return add(std::move(node));
      case PatternTree::Term::Kind::group:
        return compile_group(term, next);
      case PatternTree::Term::Kind::ahead:
        node.kind = Kind::ahead;
        break;
      case PatternTree::Term::Kind::not_ahead:
        node.kind = Kind::not_ahead;
        break;
    }
    node.alternatives.push_back(compile(term.group[0], kAccept));
    return add(std::move(node));
  }

  int compile_group(const PatternTree::Term& term, int next) {
    if (++groups_ > kMaxNodes) throw ConfigError("pattern: is too large");
    const int end = next;
    for (uint32_t i = term.min; i < term.max; ++i) {
      Node node;
      node.kind = Kind::either;
      node.alternatives = {compile(term.group[0], next), end};
      next = add(std::move(node));
    }
    for (uint32_t i = 0; i < term.min; ++i) next = compile(term.group[0], next);
    return next;
  }

  int add(Node node) {
    if (pattern_.nodes_.size() >= kMaxNodes) throw ConfigError("pattern: is too large");
    pattern_.nodes_.push_back(std::move(node));
    return int(pattern_.nodes_.size()) - 1;
  }

  Pattern& pattern_;
  size_t groups_ = 0;  ///< also those without a node
};

Pattern::Pattern(std::string_view regex) {
  const PatternTree tree = parse_pattern(regex);
  Compiler compiler(*this);
  std::vector<int> starts;
  for (const auto& terms : tree.alternatives) starts.push_back(compiler.compile(terms, kAccept));
  const std::vector<Begin> begins = find_begins();
  for (const int start : starts) {
    if (start == kAccept || begins[size_t(start)].is_empty) {
      throw ConfigError(fmt::format("pattern {}: matches the empty text, which is not supported",
                                    printable(regex, 200)));
    }
    alternatives_.push_back({start, begins[size_t(start)].first});
    first_ |= begins[size_t(start)].first;
  }
}

Pattern Pattern::literal(std::string_view text) {
  std::string regex;
  for (const char c : text) {
    const bool is_special = std::string_view("\\^$.[]|()?*+{}-&").find(c) != std::string_view::npos;
    if (is_special) regex += '\\';
    regex += c;
  }
  return Pattern(regex);
}

std::vector<Pattern::Begin> Pattern::find_begins() const {
  std::vector<Begin> begins;
  Begin accept;
  accept.is_empty = true;
  accept.first.set();
  const auto begin_of = [&](int node) -> const Begin& {
    return node == kAccept ? accept : begins[size_t(node)];
  };
  for (const Node& node : nodes_) {
    Begin begin;
    if (node.kind == Kind::set) {
      for (size_t byte = 0; byte < 256; ++byte) {
        begin.first[byte] = byte >= 128 || sets_[size_t(node.set)].contains(uint32_t(byte));
      }
      if (node.min == 0) {
        begin.first |= begin_of(node.next).first;
        begin.is_empty = begin_of(node.next).is_empty;
      }
    } else if (node.kind == Kind::either) {
      for (const int alternative : node.alternatives) {
        begin.first |= begin_of(alternative).first;
        begin.is_empty = begin.is_empty || begin_of(alternative).is_empty;
      }
    } else {
      begin = begin_of(node.next);
    }
    begins.push_back(begin);
  }
  return begins;
}

size_t Pattern::match(std::string_view text, size_t at) const {
  const auto byte = size_t(uint8_t(text[at]));
  if (!first_[byte]) return 0;
  uint64_t budget = 1'000'000 + 32 * uint64_t(text.size() - at);
  for (const Alternative& alternative : alternatives_) {
    if (!alternative.first[byte]) continue;
    const size_t end = run(alternative.node, text, at, budget);
    if (end != kNoMatch) return end - at;
  }
  return 0;
}

size_t Pattern::run(int index, std::string_view text, size_t at, uint64_t& budget) const {
  while (index != kAccept) {
    const Node& node = nodes_[size_t(index)];
    if (budget-- == 0) throw InvalidArgument("the tokenizer's pattern takes too long on this text");
    if (node.kind == Kind::set) return run_set(node, text, at, budget);
    if (node.kind == Kind::either) {
      for (size_t i = 0; i + 1 < node.alternatives.size(); ++i) {
        const size_t end = run(node.alternatives[i], text, at, budget);
        if (end != kNoMatch) return end;
      }
      index = node.alternatives.back();
      continue;
    }
    const bool found = run(node.alternatives[0], text, at, budget) != kNoMatch;
    if (found != (node.kind == Kind::ahead)) return kNoMatch;
    index = node.next;
  }
  return at;
}

size_t Pattern::run_set(const Node& node, std::string_view text, size_t at,
                        uint64_t& budget) const {
  const CharSet& set = sets_[size_t(node.set)];
  size_t end = at;
  uint32_t count = 0;
  for (; count < node.max && end < text.size(); ++count) {
    if (const auto byte = uint8_t(text[end]); byte < 128) {
      if (!set.ascii[byte]) break;
      ++end;
    } else {
      const unicode::CodePoint next = unicode::decode(text.substr(end));
      if (!set.contains(next.value)) break;
      end += next.bytes;
    }
  }
  if (count < node.min) return kNoMatch;
  if (node.next == kAccept) return end;
  for (;; --count, end = previous_character(text, end)) {
    const size_t result = run(node.next, text, end, budget);
    if (result != kNoMatch || node.is_possessive || count == node.min) return result;
  }
}

}  // namespace tandem
