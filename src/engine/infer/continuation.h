// Text of the tokens that a model generates, up to a token or a string that ends it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "engine/infer/stop_text.h"
#include "engine/tokenizer/text_decoder.h"

namespace tandem {

class Continuation {
 public:
  /// `tokenizer`: nullptr for bytes. `ends`: tokens that end a text; if it is empty, special ones
  /// do. `has_prompt`: the text continues another. Throws InvalidArgument for an empty stop string.
  Continuation(const TextTokenizer* tokenizer, std::vector<int32_t> ends,
               std::vector<std::string> stops, bool has_prompt);
  Continuation(const Continuation&) = delete;

  bool is_end(int32_t token) const;
  /// Appends a token, or the end. Returns the text that is final: whole characters, without a
  /// possible prefix of a stop string.
  std::string add(int32_t token);
  std::string rest();
  /// Stop string found, nullptr before.
  const std::string* stop() const { return stops_.stop(); }

 private:
  std::string add_text(const std::string& text);

  const TextTokenizer* tokenizer_;
  std::vector<int32_t> ends_;
  StopText stops_;
  std::optional<TextDecoder> decoder_;
};

}  // namespace tandem
