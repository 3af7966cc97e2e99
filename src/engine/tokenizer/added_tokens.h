// Tokens that are found in a text before it is divided into words.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tandem {

struct AddedToken {
  std::string content;  ///< not empty
  int32_t id = 0;
  bool is_special = false;      ///< left out of decoded text on request
  bool takes_before = false;    ///< with the white space before it ("lstrip")
  bool takes_after = false;     ///< with the white space after it ("rstrip")
  bool is_normalized = false;   ///< found in normalized text
  bool is_single_word = false;  ///< only between characters that are of no word
};

/// Finds, at each position, the longest of its tokens. One that would have to be a word and is not
/// is passed over, and no other is looked for in it.
class AddedTokens {
 public:
  AddedTokens() = default;
  explicit AddedTokens(std::vector<AddedToken> tokens);

  struct Match {
    size_t begin, end;  ///< with the white space that it takes
    int32_t id;
  };
  /// First match whose content begins at `from` or later; end = npos if there is none.
  Match find(std::string_view text, size_t from) const;

 private:
  using Child = std::pair<uint8_t, int32_t>;  // byte and node
  struct Node {
    std::vector<Child> children;
    int32_t token = -1;
  };
  std::vector<AddedToken> tokens_;
  std::vector<Node> nodes_;
  std::vector<int32_t> roots_;  ///< by first byte
};

}  // namespace tandem
