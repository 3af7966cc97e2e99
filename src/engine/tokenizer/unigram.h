// Unigram language model: a text becomes the tokens whose scores have the largest sum (Viterbi).
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tandem {

/// Distance of the score of an unknown character from the lowest of the pieces.
constexpr double kUnknownPenalty = 10;

/// Vocabulary of a unigram model.
struct UnigramModel {
  UnigramModel() { bytes.fill(-1); }

  struct Token {
    std::string text;
    int32_t id;
    double score;
  };
  /// The library whose sums of scores, and so whose choice among close ones, a file expects:
  /// sentencepiece keeps them in float, tokenizers in double.
  enum class Sums : uint8_t { sentencepiece, tokenizers };

  std::vector<Token> tokens;  ///< found in texts; of equal texts the last one holds
  double unknown_score = 0;   ///< of a character that is no token
  int32_t unknown = -1;       ///< token of such characters in a row, if their bytes have none
  std::array<int32_t, 256> bytes;
  Sums sums = Sums::sentencepiece;
};

/// Thread-safe.
class Unigram {
 public:
  /// Throws ConfigError for a model in which a text could have no tokens, or that is too large.
  explicit Unigram(UnigramModel model);

  /// Appends the tokens of `text`, in time linear in its length. A byte that is not UTF-8 is a
  /// character.
  void encode(std::string_view text, std::vector<int32_t>& out) const;

 private:
  struct Node {
    uint32_t first_child = 0;
    uint16_t children = 0;
    int32_t token = -1;
  };
  /// Best segmentation of a text's begin that ends here.
  struct Path {
    double score = 0;
    int64_t begin = -1;  ///< of its last token
    int32_t token = -1;  ///< -1: an unknown character
  };
  void build();
  int64_t child(int64_t node, uint8_t byte) const;
  void extend(std::string_view text, size_t begin, std::vector<Path>& paths) const;
  void offer(Path& end, double score, size_t begin, int32_t token) const;
  void append_unknown(std::string_view characters, std::vector<int32_t>& out) const;

  UnigramModel model_;
  std::vector<Node> nodes_;      ///< trie; children are consecutive, sorted by label
  std::vector<uint8_t> labels_;  ///< of nodes_
};

}  // namespace tandem
