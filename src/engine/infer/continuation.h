// Text of the tokens that a model generates, up to a token or a string that ends it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "engine/infer/sampling/stop_text.h"
#include "engine/tokenizer/text_decoder.h"

namespace tandem {

struct TextOptions {
  std::vector<int32_t> eos_token_ids = {};   ///< tokens that end a text; empty: special ones do
  std::vector<int32_t> stop_token_ids = {};  ///< tokens that end a text, too
  std::vector<std::string> stops = {};       ///< strings that end a text
  bool has_text_before = true;  ///< the text continues one, so that a first space is one
  bool hides_special = true;    ///< special tokens have no text, except `shown`
  std::vector<int32_t> shown = {};
};

class Continuation {
 public:
  /// `tokenizer`: nullptr for bytes. Throws InvalidArgument for an empty stop string.
  Continuation(const TextTokenizer* tokenizer, TextOptions options);
  Continuation(const Continuation&) = delete;

  bool is_end(int32_t token) const;
  /// Appends a token, or the end. Returns the text that is final: whole characters, without a
  /// possible prefix of a stop string.
  std::string add(int32_t token);
  std::string rest();
  /// Stop string found, nullptr before.
  const std::string* stop() const { return stops_.stop(); }

 private:
  bool is_hidden(int32_t token) const;
  std::string add_text(const std::string& text);

  const TextTokenizer* tokenizer_;
  TextOptions options_;
  StopText stops_;
  std::optional<TextDecoder> decoder_;
};

}  // namespace tandem
