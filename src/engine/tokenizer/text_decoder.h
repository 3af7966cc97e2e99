// Text of tokens that arrive one by one.
#pragma once

#include <cstdint>
#include <string>

#include "engine/tokenizer/text_tokenizer.h"

namespace tandem {

/// Valid UTF-8 from bytes in parts: an incomplete character is held back, and each maximal part of
/// one that is not continued becomes U+FFFD.
class Utf8Stream {
 public:
  /// Complete characters, now that these bytes follow.
  std::string add(std::string_view bytes);
  /// Text held back, once no more bytes follow.
  std::string rest();

 private:
  std::string pending_;
};

/// Text of tokens, whole characters at a time.
class TextDecoder {
 public:
  /// The tokenizer must outlive this. `continues`: the tokens follow others, so that a space before
  /// the first word is one.
  TextDecoder(const TextTokenizer& tokenizer, bool skips_special, bool continues = false)
      : tokenizer_(tokenizer), skips_special_(skips_special), is_begin_(!continues) {}
  std::string add(int32_t token);
  std::string rest() { return stream_.rest(); }

 private:
  const TextTokenizer& tokenizer_;
  bool skips_special_;
  bool is_begin_;
  Utf8Stream stream_;
};

}  // namespace tandem
