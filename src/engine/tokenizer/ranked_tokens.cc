#include "engine/tokenizer/ranked_tokens.h"

#include <fmt/format.h>

#include <string_view>

#include "core/system/printable.h"
#include "engine/tokenizer/unicode/unicode.h"
#include "tandem/error.h"

namespace tandem {
namespace {

/// Longer tokens are refused: the number of ways to divide them is bounded.
constexpr size_t kMaxBytes = 4096;
constexpr size_t kMaxMerges = size_t(1) << 23;

/// Characters that are no tokens would be merged before they become bytes.
void require_characters(const RankedToken& token, const BpeModel::Vocabulary& tokens) {
  const std::string_view text = token.text;
  for (size_t at = 0; at < text.size();) {
    const std::string_view character = text.substr(at, unicode::decode(text.substr(at)).bytes);
    if (!tokens.contains(character)) {
      throw ConfigError(fmt::format("token {} has the character {}, which is no token", token.id,
                                    printable(character)));
    }
    at += character.size();
  }
}

}  // namespace

std::vector<BpeMerge> merges_of_tokens(const std::vector<RankedToken>& ranked,
                                       const BpeModel::Vocabulary& tokens, bool by_character) {
  std::vector<BpeMerge> merges;
  for (const RankedToken& token : ranked) {
    const std::string_view text = token.text;
    if (text.size() > kMaxBytes) {
      throw ConfigError(fmt::format("token {} has {} bytes: expected at most {}", token.id,
                                    text.size(), kMaxBytes));
    }
    if (by_character) require_characters(token, tokens);
    for (size_t at = 1; at < text.size(); ++at) {
      if (by_character && (uint8_t(text[at]) & 0xc0) == 0x80) continue;
      const auto left = tokens.find(text.substr(0, at));
      if (left == tokens.end()) continue;
      const auto right = tokens.find(text.substr(at));
      if (right == tokens.end()) continue;
      merges.push_back({left->second, right->second, token.id, token.rank});
    }
    if (merges.size() > kMaxMerges) throw ConfigError("vocabulary has too many pairs of tokens");
  }
  return merges;
}

}  // namespace tandem
