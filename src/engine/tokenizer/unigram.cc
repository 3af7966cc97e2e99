#include "engine/tokenizer/unigram.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "engine/tokenizer/unicode/unicode.h"
#include "tandem/error.h"

namespace tandem {
namespace {

/// Bytes of all tokens, which bound the trie; public vocabularies have 3 MB or less.
constexpr size_t kMaxVocabularyBytes = size_t(32) << 20;

}  // namespace

Unigram::Unigram(UnigramModel model) : model_(std::move(model)) {
  if (model_.unknown < 0) throw ConfigError("vocabulary has no token for the unknown");
  size_t bytes = 0;
  for (const UnigramModel::Token& token : model_.tokens) {
    bytes += token.text.size();
    if (!std::isfinite(token.score)) {
      throw ConfigError(fmt::format("piece {}: expected a finite score", token.id));
    }
  }
  if (bytes > kMaxVocabularyBytes) {
    throw ConfigError(fmt::format("vocabulary has {} bytes of texts: expected at most {}", bytes,
                                  kMaxVocabularyBytes));
  }
  build();
}

void Unigram::build() {
  std::vector<UnigramModel::Token>& tokens = model_.tokens;
  std::ranges::stable_sort(tokens, {}, &UnigramModel::Token::text);
  struct Range {
    size_t begin, end, depth;  // tokens with a common begin of `depth` bytes
  };
  std::vector<Range> ranges{{0, tokens.size(), 0}};
  nodes_.resize(1), labels_.resize(1);
  for (size_t at = 0; at < nodes_.size(); ++at) {
    auto [begin, end, depth] = ranges[at];
    for (; begin < end && tokens[begin].text.size() == depth; ++begin) {
      if (depth > 0) nodes_[at].token = int32_t(begin);
    }
    nodes_[at].first_child = uint32_t(nodes_.size());
    while (begin < end) {
      const char label = tokens[begin].text[depth];
      size_t next = begin;
      while (next < end && tokens[next].text[depth] == label) ++next;
      nodes_.emplace_back();
      labels_.push_back(uint8_t(label));
      ranges.push_back({begin, next, depth + 1});
      ++nodes_[at].children;
      begin = next;
    }
  }
}

int64_t Unigram::child(int64_t node, uint8_t byte) const {
  const Node& here = nodes_[size_t(node)];
  const auto begin = labels_.begin() + here.first_child, end = begin + here.children;
  const auto found = std::lower_bound(begin, end, byte);
  return found == end || *found != byte ? -1 : found - labels_.begin();
}

void Unigram::offer(Path& end, double score, size_t begin, int32_t token) const {
  if (model_.sums == UnigramModel::Sums::sentencepiece) score = double(float(score));
  if (end.begin < 0 || score > end.score) end = {score, int64_t(begin), token};
}

void Unigram::extend(std::string_view text, size_t begin, std::vector<Path>& paths) const {
  const double before = paths[begin].score;
  const size_t character = unicode::decode(text.substr(begin)).bytes;
  bool is_known = false;
  int64_t node = 0;
  for (size_t at = begin; at < text.size();) {
    node = child(node, uint8_t(text[at++]));
    if (node < 0) break;
    const int32_t token = nodes_[size_t(node)].token;
    if (token < 0) continue;
    offer(paths[at], model_.tokens[size_t(token)].score + before, begin, token);
    is_known = is_known || at - begin == character;
  }
  if (is_known) return;
  offer(paths[begin + character], model_.unknown_score + before, begin, -1);
}

void Unigram::encode(std::string_view text, std::vector<int32_t>& out) const {
  if (text.empty()) return;
  std::vector<Path> paths(text.size() + 1);
  for (size_t at = 0; at < text.size(); at += unicode::decode(text.substr(at)).bytes) {
    extend(text, at, paths);
  }
  std::vector<std::pair<size_t, size_t>> steps;  // begin and end, from the last
  for (size_t end = text.size(); end > 0; end = size_t(paths[end].begin)) {
    steps.emplace_back(size_t(paths[end].begin), end);
  }
  const auto is_unknown = [&](size_t end) {
    const int32_t token = paths[end].token;
    return token < 0 || model_.tokens[size_t(token)].id == model_.unknown;
  };
  for (size_t i = steps.size(); i-- > 0;) {
    const auto [begin, end] = steps[i];
    if (!is_unknown(end)) {
      out.push_back(model_.tokens[size_t(paths[end].token)].id);
      continue;
    }
    size_t last = end;
    for (; i > 0 && is_unknown(steps[i - 1].second); --i) last = steps[i - 1].second;
    append_unknown(text.substr(begin, last - begin), out);
  }
}

void Unigram::append_unknown(std::string_view characters, std::vector<int32_t>& out) const {
  if (model_.sums == UnigramModel::Sums::tokenizers) {
    int64_t node = 0;
    for (const char c : characters) {
      if (node >= 0) node = child(node, uint8_t(c));
    }
    if (node >= 0 && nodes_[size_t(node)].token >= 0) {
      out.push_back(model_.tokens[size_t(nodes_[size_t(node)].token)].id);
      return;
    }
  }
  const bool has_bytes =
      std::ranges::all_of(characters, [&](char c) { return model_.bytes[uint8_t(c)] >= 0; });
  if (!has_bytes) return out.push_back(model_.unknown);
  for (const char c : characters) out.push_back(model_.bytes[uint8_t(c)]);
}

}  // namespace tandem
