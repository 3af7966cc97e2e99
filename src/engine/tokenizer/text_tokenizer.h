// Tokenizers of published models, read from their files (engine/tokenizer/open.h).
//
// A text is divided at its added tokens; the rest is normalized, divided into words and each word
// encoded (engine/tokenizer/bpe.h, unigram.h). Bytes that are not UTF-8 are encoded as bytes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/tokenizer/added_tokens.h"
#include "engine/tokenizer/bpe.h"
#include "engine/tokenizer/pattern.h"
#include "engine/tokenizer/tokenizer.h"
#include "engine/tokenizer/unicode/normalization.h"
#include "engine/tokenizer/unigram.h"

namespace tandem {

/// A step that divides or changes sections of text before they are encoded.
struct WordStep {
  enum class Kind : uint8_t {
    split,   ///< at the matches of `pattern`
    prefix,  ///< a space before a section that begins with none
    metaspace
  };
  enum class Prepend : uint8_t { never, first, always };
  /// Neighbours that a match becomes one word with: none, the gap before or after it, or matches.
  enum class Joins : uint8_t { none, previous, next, matches };
  Kind kind;
  std::optional<Pattern> pattern = {};
  bool keeps_matches = true, keeps_gaps = true;
  Joins joins = Joins::none;
  bool is_inverted = false;  ///< with `joins`: gaps are the matches
  std::string space = {};    ///< metaspace: replaces ' '
  Prepend prepend = Prepend::never;
  bool splits = false;  ///< metaspace: before each `space`
};

struct TokenText {
  std::string bytes;
  std::string first_bytes;   ///< with Strip::all: as a text's first token
  bool is_token = false;     ///< whether the id is in use
  bool keeps_space = false;  ///< as a text's first token, with Strip::one and Strip::each
  bool is_special = false;
};

struct TokenizerSpec {
  /// Token of a name, as <|im_end|>; -1 if there is none.
  int32_t find(std::string_view token) const;

  std::string name;  ///< identifies the tokens that a text becomes
  BpeModel bpe;
  std::optional<UnigramModel> unigram = {};  ///< instead of `bpe`
  std::vector<Normalization> normalizations;
  std::vector<WordStep> steps;
  std::vector<AddedToken> added;
  bool normalizes_added = true;  ///< the contents of normalized ones, before they are looked for
  std::vector<int32_t> before, after;  ///< of each text, as "<s>" and "</s>"
  std::vector<TokenText> texts;        ///< by id
  /// Spaces that the begin of a decoded text loses: none, one, one of each token until there is
  /// text, or all that its first token wrote as another character.
  enum class Strip : uint8_t { none, one, each, all } strip = Strip::none;
  int32_t separator = -1;  ///< token between documents
  bool has_bos_switch =
      false;  ///< SentencePiece: other files say which of `before` and `after` hold
  std::map<std::string, int32_t, std::less<>> ids;    ///< of tokens whose name is not their text
  std::map<std::string, std::string> special_tokens;  ///< by role: bos_token, eos_token, …
  int64_t max_vocab = 0;           ///< tokens that a model has an embedding of; 0: all
  std::vector<std::string> notes;  ///< settings of the file that are not applied
};

class TextTokenizer : public Tokenizer {
 public:
  /// Throws ConfigError.
  explicit TextTokenizer(TokenizerSpec spec);

  std::string name() const override { return spec_.name; }
  int64_t vocab() const override {
    const auto all = int64_t(spec_.texts.size());
    return spec_.max_vocab > 0 ? std::min(spec_.max_vocab, all) : all;
  }
  /// Number of tokens from vocab() on, which the model has no embedding of, and whether they are
  /// added ones only, which ordinary texts do not hold.
  int64_t num_beyond() const { return int64_t(spec_.texts.size()) - vocab(); }
  bool only_added_beyond() const { return base_vocab_ <= vocab(); }
  /// Settings of the file that are not applied, a line each.
  const std::vector<std::string>& notes() const { return spec_.notes; }
  /// `separator()`, then the document's tokens. Throws ConfigError if there is no separator.
  void append(std::string_view document, std::vector<int32_t>& tokens) const override;
  void append_text(std::string_view document, std::vector<int32_t>& tokens) const override {
    encode(document, false, tokens);
  }
  void append_more(std::string_view text, std::vector<int32_t>& tokens) const override {
    encode(text, Begin::middle, tokens);
  }

  /// Token that begins a document: the first that the file adds to a text, or else its end of text;
  /// -1 if it has neither.
  int32_t separator() const { return spec_.separator; }
  /// Names of special tokens by role (bos_token, eos_token, …), as far as the files give them.
  const std::map<std::string, std::string>& special_tokens() const { return spec_.special_tokens; }
  /// Token of a name, as <|im_end|>; -1 if there is none.
  int32_t find(std::string_view name) const { return spec_.find(name); }
  bool is_special(int32_t token) const {
    return token >= 0 && token < vocab() && spec_.texts[size_t(token)].is_special;
  }
  /// Max bytes of a text for each of its tokens, so that a text can be known to be too long before
  /// it is encoded; 0: there is no such number, as a token may take any number of characters.
  int64_t max_bytes_per_token() const { return max_bytes_per_token_; }
  /// Whether the file adds tokens before each text.
  bool adds_before() const { return !spec_.before.empty(); }
  /// Appends the tokens of `text`. `adds`: with those that the file adds to each text. Throws
  /// InvalidArgument for a token that is not below vocab(), as all functions that append tokens.
  void encode(std::string_view text, bool adds, std::vector<int32_t>& tokens) const;
  /// Appends the bytes of a token, none if the id is no token. `is_begin`: whether nothing was
  /// appended before it, which this call updates.
  void decode(int32_t token, bool skips_special, bool& is_begin, std::string& text) const;
  /// Bytes of a text.
  std::string decode(std::span<const int32_t> tokens, bool skips_special) const;

 private:
  /// Position of a section's begin: a text's, after an added token or a word, or within what would
  /// be a section if the text were not cut.
  enum class Begin : uint8_t { text, section, middle };
  int64_t find_max_bytes_per_token() const;
  struct Encoding {
    Bpe::Cache* cache;
    std::vector<int32_t>& tokens;
  };
  void encode(std::string_view text, Begin begin, std::vector<int32_t>& tokens) const;
  void require_embedded(std::span<const int32_t> tokens) const;
  void encode_section(std::string_view section, Begin begin, Encoding& to) const;
  void encode_words(size_t step, std::string_view section, Begin begin, Encoding& to) const;
  void split(size_t step, std::string_view section, Begin begin, Encoding& to) const;
  void split_joined(size_t step, std::string_view section, Begin begin, Encoding& to) const;
  void metaspace(size_t step, std::string_view section, Begin begin, Encoding& to) const;

  TokenizerSpec spec_;
  std::optional<Bpe> bpe_;  ///< this or unigram_
  std::optional<Unigram> unigram_;
  AddedTokens raw_, normalized_;
  int64_t max_bytes_per_token_;
  int64_t base_vocab_;  ///< tokens below the added ones at the end
};

}  // namespace tandem
