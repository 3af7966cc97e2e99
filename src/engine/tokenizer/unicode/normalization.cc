#include "engine/tokenizer/unicode/normalization.h"

#include "engine/tokenizer/unicode/byte_characters.h"
#include "engine/tokenizer/unicode/unicode.h"

namespace tandem {
namespace {

std::string replace_matches(std::string_view text, const Pattern& pattern, std::string_view to) {
  std::string result;
  for (size_t at = 0; at < text.size();) {
    if (const size_t matched = pattern.match(text, at); matched > 0) {
      result += to;
      at += matched;
      continue;
    }
    const size_t bytes = unicode::decode(text.substr(at)).bytes;
    result += text.substr(at, bytes);
    at += bytes;
  }
  return result;
}

std::string_view strip(std::string_view text, bool left, bool right) {
  if (left) text.remove_prefix(unicode::leading_space(text));
  if (right) text.remove_suffix(unicode::trailing_space(text));
  return text;
}

/// Next of a text's characters as sentencepiece normalizes them, and the bytes that it replaces.
class NormalizedCharacters {
 public:
  NormalizedCharacters(const NormalizerSpec& rules, std::string_view text)
      : rules_(rules), text_(text) {}

  bool is_end() const { return at_ == text_.size(); }
  void skip(size_t bytes) { at_ += bytes; }
  CharacterMap::Match next() {
    if (symbol_.end != text_.npos && symbol_.begin < at_) symbol_ = rules_.symbols.find(text_, at_);
    const std::string_view rest = text_.substr(at_);
    if (symbol_.id >= 0 && symbol_.begin == at_) {
      const size_t bytes = symbol_.end - at_;
      return {bytes, rest.substr(0, bytes)};
    }
    if (rules_.characters) {
      if (const CharacterMap::Match match = rules_.characters->longest(rest); match.bytes > 0) {
        return match;
      }
    }
    const size_t bytes = unicode::decode(rest).bytes;
    return {bytes, rest.substr(0, bytes)};
  }

 private:
  const NormalizerSpec& rules_;
  std::string_view text_;
  size_t at_ = 0;
  AddedTokens::Match symbol_ = rules_.symbols.find(text_, 0);
};

std::string normalize_sentencepiece(const NormalizerSpec& rules, std::string_view text,
                                    bool is_begin, bool is_first) {
  const std::string space = rules.escapes ? "\u2581" : " ";
  NormalizedCharacters characters(rules, text);
  if (rules.removes_spaces && is_begin) {
    while (!characters.is_end()) {
      const CharacterMap::Match first = characters.next();
      if (first.replacement != " ") break;
      characters.skip(first.bytes);
    }
  }
  if (characters.is_end()) return "";
  std::string result;
  const bool adds_space = rules.adds_space && (is_first || !rules.only_first);
  if (adds_space && !rules.at_end && is_begin) result += space;
  for (bool after_space = rules.removes_spaces && is_begin; !characters.is_end();) {
    auto [bytes, next] = characters.next();
    characters.skip(bytes);
    while (after_space && next.starts_with(' ')) next.remove_prefix(1);
    if (next.empty()) continue;
    for (const char c : next) c == ' ' ? result += space : result += c;
    after_space = rules.removes_spaces && next.ends_with(' ');
  }
  while (rules.removes_spaces && result.ends_with(space)) {
    result.resize(result.size() - space.size());
  }
  if (adds_space && rules.at_end) result += space;
  return result;
}

}  // namespace

std::string normalize(std::span<const Normalization> steps, std::string_view text, bool is_begin,
                      bool is_first) {
  std::string result(text);
  for (const Normalization& step : steps) {
    switch (step.kind) {
      case Normalization::Kind::nfc:
        result = unicode::to_nfc(result);
        break;
      case Normalization::Kind::change:
        result = step.change(result);
        break;
      case Normalization::Kind::prepend:
        if (is_begin && !result.empty()) result.insert(0, step.to);
        break;
      case Normalization::Kind::replace:
        result = replace_all(result, step.from, step.to);
        break;
      case Normalization::Kind::matches:
        result = replace_matches(result, *step.pattern, step.to);
        break;
      case Normalization::Kind::strip:
        result = std::string(strip(result, step.strips_left, step.strips_right));
        break;
      case Normalization::Kind::clusters:
        result = step.characters->replace_clusters(result);
        break;
      case Normalization::Kind::sentencepiece:
        result = normalize_sentencepiece(*step.rules, result, is_begin, is_first);
        break;
    }
  }
  return result;
}

}  // namespace tandem
