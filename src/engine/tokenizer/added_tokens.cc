#include "engine/tokenizer/added_tokens.h"

#include <algorithm>

#include "engine/tokenizer/unicode/unicode.h"

namespace tandem {

namespace {

/// Whether no letter, digit, mark or connector stands next to the match.
bool is_word(std::string_view text, const AddedTokens::Match& match) {
  const bool begins = match.begin == 0 || !unicode::ends_with_word(text.substr(0, match.begin));
  return begins && (match.end == text.size() || !unicode::begins_with_word(text.substr(match.end)));
}

}  // namespace

AddedTokens::AddedTokens(std::vector<AddedToken> tokens)
    : tokens_(std::move(tokens)), roots_(256, -1) {
  const auto add_node = [this] {
    nodes_.emplace_back();
    return int32_t(nodes_.size()) - 1;
  };
  for (size_t i = 0; i < tokens_.size(); ++i) {
    const std::string& content = tokens_[i].content;
    int32_t& root = roots_[uint8_t(content[0])];
    if (root < 0) root = add_node();
    auto node = size_t(root);
    for (size_t at = 1; at < content.size(); ++at) {
      const auto byte = uint8_t(content[at]);
      const auto child = std::ranges::find(nodes_[node].children, byte, &Child::first);
      if (child != nodes_[node].children.end()) {
        node = size_t(child->second);
      } else {
        const int32_t added = add_node();
        nodes_[node].children.push_back({byte, added});
        node = size_t(added);
      }
    }
    nodes_[node].token = int32_t(i);
  }
}

AddedTokens::Match AddedTokens::find(std::string_view text, size_t from) const {
  if (tokens_.empty()) return {text.size(), text.npos, -1};
  for (size_t begin = from; begin < text.size(); ++begin) {
    int32_t node = roots_[uint8_t(text[begin])];
    int32_t longest = -1;
    for (size_t at = begin + 1; node >= 0; ++at) {
      const Node& here = nodes_[size_t(node)];
      if (here.token >= 0) longest = here.token;
      if (at == text.size()) break;
      const auto child = std::ranges::find(here.children, uint8_t(text[at]), &Child::first);
      node = child == here.children.end() ? -1 : child->second;
    }
    if (longest < 0) continue;
    const AddedToken& token = tokens_[size_t(longest)];
    Match match{begin, begin + token.content.size(), token.id};
    if (token.is_single_word && !is_word(text, match)) {
      begin = match.end - 1;
      continue;
    }
    if (token.takes_before) {
      match.begin -= unicode::trailing_space(text.substr(from, begin - from));
    }
    if (token.takes_after) match.end += unicode::leading_space(text.substr(match.end));
    return match;
  }
  return {text.size(), text.npos, -1};
}

}  // namespace tandem
