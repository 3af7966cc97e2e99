// Replacements of characters as SentencePiece's models carry them (precompiled_charsmap), for
// example NFKC: a double-array trie of what is replaced (darts-clone's format), and the
// replacements.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tandem {

class CharacterMap {
 public:
  /// Throws ConfigError for bytes that are no such map.
  explicit CharacterMap(std::string_view bytes);

  struct Match {
    size_t bytes = 0;  ///< that are replaced, from the text's begin; 0: none
    std::string_view replacement;
  };
  /// The longest entry that `text` begins with, as sentencepiece takes it.
  Match longest(std::string_view text) const { return find(text, false); }
  /// The text as tokenizers has it: a cluster of characters (Unicode's extended grapheme clusters)
  /// of less than 6 bytes that begins with an entry is replaced by the shortest such entry's text,
  /// other characters each.
  std::string replace_clusters(std::string_view text) const;

 private:
  Match find(std::string_view text, bool takes_shortest) const;

  std::vector<uint32_t> units_;
  std::string replacements_;  ///< each ends with 0
};

/// Bytes of the extended grapheme cluster that `text`, not empty, begins with. Sequences joined by
/// U+200D and Indic conjuncts count as several clusters.
size_t cluster_bytes(std::string_view text);

}  // namespace tandem
