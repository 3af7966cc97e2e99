// Changes of a text before it is divided into words.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "engine/tokenizer/added_tokens.h"
#include "engine/tokenizer/pattern.h"
#include "engine/tokenizer/unicode/character_map.h"

namespace tandem {

/// Normalization of SentencePiece's models.
struct NormalizerSpec {
  std::optional<CharacterMap> characters = {};
  AddedTokens symbols = {};  ///< user-defined: stay as they are
  bool adds_space = true;    ///< to a text: before it, or with `at_end` after it
  bool at_end = false;
  bool only_first = false;      ///< the space is added to a text's first section only
  bool removes_spaces = false;  ///< at the ends, and all but one in a row
  bool escapes = true;          ///< spaces become U+2581
};

struct Normalization {
  enum class Kind : uint8_t {
    nfc,
    change,
    prepend,
    replace,
    matches,
    strip,
    clusters,
    sentencepiece
  };
  Kind kind;
  std::string from = {}, to = {};  ///< `to`: also what is prepended, to texts that are not empty
  std::optional<Pattern> pattern = {};  ///< matches: each becomes `to`
  bool strips_left = false, strips_right = false;
  std::shared_ptr<const CharacterMap> characters = {};  ///< clusters
  std::shared_ptr<const NormalizerSpec> rules = {};     ///< sentencepiece
  std::string (*change)(std::string_view) = nullptr;    ///< change: of the whole text
};

/// `is_begin`: of a section, rather than a text that continues another; `is_first`: of the text's
/// first section.
std::string normalize(std::span<const Normalization> steps, std::string_view text,
                      bool is_begin = true, bool is_first = true);

}  // namespace tandem
