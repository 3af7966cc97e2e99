#include "engine/tokenizer/text_tokenizer.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <utility>

#include "core/system/printable.h"
#include "engine/tokenizer/unicode/byte_characters.h"
#include "engine/tokenizer/unicode/unicode.h"
#include "tandem/error.h"

namespace tandem {

namespace {

/// Bytes of U+2581, which tokens may write as a space.
constexpr int64_t kSpaceBytes = 3;

/// Max bytes that a normalization makes one byte of; 0: any number.
int64_t max_shrinkage(const Normalization& step) {
  constexpr int64_t kComposed = 3;  // U+0390 has 6 bytes decomposed and 2 composed, others less
  switch (step.kind) {
    case Normalization::Kind::nfc:
      return kComposed;
    case Normalization::Kind::prepend:
      return 1;
    case Normalization::Kind::replace:
      return step.to.size() >= step.from.size() ? kSpaceBytes : 0;
    case Normalization::Kind::sentencepiece:
      return step.rules->removes_spaces || step.rules->characters ? 0 : kSpaceBytes;
    case Normalization::Kind::change:
    case Normalization::Kind::matches:
    case Normalization::Kind::strip:
    case Normalization::Kind::clusters:
      return 0;
  }
  return 0;
}

/// Calls `visit(begin, end, is_match)` for the gaps, which may be empty, and the matches of a
/// section in order.
template <typename Visit>
void for_each_span(const Pattern& pattern, std::string_view section, const Visit& visit) {
  size_t gap = 0;
  for (size_t at = 0; at < section.size();) {
    const size_t matched = pattern.match(section, at);
    if (matched == 0) {
      at += unicode::decode(section.substr(at)).bytes;
      continue;
    }
    visit(gap, at, false);
    visit(at, at + matched, true);
    gap = at += matched;
  }
  visit(gap, section.size(), false);
}

}  // namespace

int32_t TokenizerSpec::find(std::string_view token) const {
  if (const auto found = ids.find(token); found != ids.end()) return found->second;
  for (size_t id = 0; id < texts.size(); ++id) {
    if (texts[id].is_token && texts[id].bytes == token) return int32_t(id);
  }
  return -1;
}

TextTokenizer::TextTokenizer(TokenizerSpec spec) : spec_(std::move(spec)) {
  max_bytes_per_token_ = find_max_bytes_per_token();
  base_vocab_ = int64_t(spec_.texts.size());
  std::set<int64_t> added;
  for (const AddedToken& token : spec_.added) added.insert(token.id);
  while (base_vocab_ > 0 &&
         (added.contains(base_vocab_ - 1) || !spec_.texts[size_t(base_vocab_ - 1)].is_token)) {
    --base_vocab_;
  }
  if (spec_.unigram) {
    unigram_.emplace(std::move(*spec_.unigram));
    spec_.unigram.reset();
  } else {
    bpe_.emplace(std::exchange(spec_.bpe, {}));
  }
  std::vector<AddedToken> raw, normalized;
  for (AddedToken& token : spec_.added) {
    if (token.is_normalized && spec_.normalizes_added) {
      token.content = normalize(spec_.normalizations, token.content);
    }
    if (!token.content.empty()) (token.is_normalized ? normalized : raw).push_back(token);
  }
  raw_ = AddedTokens(std::move(raw));
  normalized_ = AddedTokens(std::move(normalized));
  spec_.added = {};
}

int64_t TextTokenizer::find_max_bytes_per_token() const {
  const auto& bytes = spec_.unigram ? spec_.unigram->bytes : spec_.bpe.bytes;
  const bool has_bytes = std::ranges::all_of(bytes, [](int32_t id) { return id >= 0; });
  const bool keeps_all =
      has_bytes &&  // else one unknown token may stand for many characters
      std::ranges::none_of(spec_.added, [](auto& t) { return t.takes_before || t.takes_after; }) &&
      std::ranges::all_of(spec_.steps, [](auto& s) { return s.keeps_matches && s.keeps_gaps; });
  if (!keeps_all) return 0;
  size_t longest = 1;
  for (const TokenText& text : spec_.texts) longest = std::max(longest, text.bytes.size());
  for (const AddedToken& token : spec_.added) longest = std::max(longest, token.content.size());
  auto max = int64_t(longest);
  for (const Normalization& step : spec_.normalizations) max *= max_shrinkage(step);
  for (const WordStep& step : spec_.steps)
    max *= step.kind == WordStep::Kind::metaspace ? kSpaceBytes : 1;
  return max;
}

void TextTokenizer::append(std::string_view document, std::vector<int32_t>& tokens) const {
  if (separator() < 0) {
    throw ConfigError("data.tokenizer: has no token that begins or ends a document");
  }
  tokens.push_back(separator());
  encode(document, false, tokens);
}

void TextTokenizer::encode(std::string_view text, bool adds, std::vector<int32_t>& tokens) const {
  if (adds) tokens.insert(tokens.end(), spec_.before.begin(), spec_.before.end());
  encode(text, Begin::text, tokens);
  if (adds) tokens.insert(tokens.end(), spec_.after.begin(), spec_.after.end());
}

void TextTokenizer::encode(std::string_view text, Begin begin, std::vector<int32_t>& tokens) const {
  const Bpe::Lease lease = bpe_ ? bpe_->lease() : Bpe::Lease();
  Encoding to{lease.cache.get(), tokens};
  const size_t before = tokens.size();
  for (size_t at = 0; at < text.size();) {
    const AddedTokens::Match match = raw_.find(text, at);
    encode_section(text.substr(at, match.begin - at), at == 0 ? begin : Begin::section, to);
    if (match.id < 0) break;
    tokens.push_back(match.id);
    at = match.end;
  }
  require_embedded(std::span(tokens).subspan(before));
}

void TextTokenizer::require_embedded(std::span<const int32_t> tokens) const {
  if (vocab() == int64_t(spec_.texts.size())) return;
  for (const int32_t token : tokens) {
    if (token < vocab()) continue;
    throw InvalidArgument(fmt::format(
        "token {}, '{}': expected tokens from 0 to {}, which the model has an embedding of", token,
        printable(spec_.texts[size_t(token)].bytes), vocab() - 1));
  }
}

void TextTokenizer::encode_section(std::string_view section, Begin begin, Encoding& to) const {
  if (section.empty()) return;
  std::string changed;
  if (!spec_.normalizations.empty()) {
    changed =
        normalize(spec_.normalizations, section, begin != Begin::middle, begin == Begin::text);
    section = changed;
  }
  for (size_t at = 0; at < section.size();) {
    const AddedTokens::Match match = normalized_.find(section, at);
    encode_words(0, section.substr(at, match.begin - at), at == 0 ? begin : Begin::section, to);
    if (match.id < 0) break;
    to.tokens.push_back(match.id);
    at = match.end;
  }
}

void TextTokenizer::encode_words(size_t step, std::string_view section, Begin begin,
                                 Encoding& to) const {
  if (section.empty()) return;
  if (step == spec_.steps.size()) {
    return bpe_ ? bpe_->encode(section, *to.cache, to.tokens)
                : unigram_->encode(section, to.tokens);
  }
  switch (spec_.steps[step].kind) {
    case WordStep::Kind::split:
      return split(step, section, begin, to);
    case WordStep::Kind::metaspace:
      return metaspace(step, section, begin, to);
    case WordStep::Kind::prefix:
      if (begin == Begin::middle || section.starts_with(' ')) {
        return encode_words(step + 1, section, begin, to);
      }
      encode_words(step + 1, " " + std::string(section), begin, to);
  }
}

void TextTokenizer::split(size_t step, std::string_view section, Begin begin, Encoding& to) const {
  const WordStep& how = spec_.steps[step];
  if (how.joins != WordStep::Joins::none) return split_joined(step, section, begin, to);
  for_each_span(*how.pattern, section, [&](size_t from, size_t end, bool is_match) {
    if (!(is_match ? how.keeps_matches : how.keeps_gaps)) return;
    encode_words(step + 1, section.substr(from, end - from), from == 0 ? begin : Begin::section,
                 to);
  });
}

void TextTokenizer::split_joined(size_t step, std::string_view section, Begin begin,
                                 Encoding& to) const {
  using enum WordStep::Joins;
  const WordStep& how = spec_.steps[step];
  struct Span {
    size_t begin, end;
    bool is_match;
  };
  std::vector<Span> spans;
  for_each_span(*how.pattern, section, [&](size_t from, size_t end, bool is_match) {
    if (from < end) spans.push_back({from, end, is_match != how.is_inverted});
  });
  const auto is_joined = [&](const Span& left, const Span& right) {
    if (how.joins == matches) return left.is_match == right.is_match;
    return how.joins == previous ? right.is_match && !left.is_match
                                 : left.is_match && !right.is_match;
  };
  for (size_t i = 0; i < spans.size();) {
    size_t end = i + 1;
    while (end < spans.size() && is_joined(spans[end - 1], spans[end])) ++end;
    encode_words(step + 1, section.substr(spans[i].begin, spans[end - 1].end - spans[i].begin),
                 i == 0 ? begin : Begin::section, to);
    i = end;
  }
}

void TextTokenizer::metaspace(size_t step, std::string_view section, Begin begin,
                              Encoding& to) const {
  const WordStep& how = spec_.steps[step];
  std::string text = replace_all(section, " ", how.space);
  const bool prepends = (how.prepend == WordStep::Prepend::always && begin != Begin::middle) ||
                        (how.prepend == WordStep::Prepend::first && begin == Begin::text);
  if (prepends && !text.starts_with(how.space)) text.insert(0, how.space);
  if (!how.splits) return encode_words(step + 1, text, begin, to);
  const std::string_view whole = text;
  for (size_t at = 0; at < whole.size();) {
    const size_t end = std::min(whole.find(how.space, at + 1), whole.size());
    encode_words(step + 1, whole.substr(at, end - at), at == 0 ? begin : Begin::section, to);
    at = end;
  }
}

void TextTokenizer::decode(int32_t token, bool skips_special, bool& is_begin,
                           std::string& text) const {
  if (token < 0 || size_t(token) >= spec_.texts.size()) return;
  const TokenText& from = spec_.texts[size_t(token)];
  if (!from.is_token || (skips_special && from.is_special)) return;
  using enum TokenizerSpec::Strip;
  std::string_view bytes = from.bytes;
  if (is_begin && spec_.strip == all) bytes = from.first_bytes;
  const bool strips = is_begin && (spec_.strip == one || spec_.strip == each);
  if (strips && !from.keeps_space && bytes.starts_with(' ')) bytes.remove_prefix(1);
  text += bytes;
  is_begin = strips && (spec_.strip == one ? from.bytes : bytes).empty();
}

std::string TextTokenizer::decode(std::span<const int32_t> tokens, bool skips_special) const {
  std::string text;
  bool is_begin = true;
  for (const int32_t token : tokens) decode(token, skips_special, is_begin, text);
  return text;
}

}  // namespace tandem
