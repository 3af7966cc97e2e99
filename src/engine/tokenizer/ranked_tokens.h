// Merges of vocabularies that rank ranked rather than pairs.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/tokenizer/bpe.h"

namespace tandem {

struct RankedToken {
  std::string text;
  int32_t id, rank;
};

/// All pairs of tokens that together are one of the ranked. `by_character`: divided only between
/// characters. Throws ConfigError if there are too many.
std::vector<BpeMerge> merges_of_tokens(const std::vector<RankedToken>& ranked,
                                       const BpeModel::Vocabulary& tokens, bool by_character);

}  // namespace tandem
