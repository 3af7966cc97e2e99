#include "engine/infer/continuation.h"

#include <algorithm>
#include <utility>

#include "engine/model/config.h"

namespace tandem {

Continuation::Continuation(const TextTokenizer* tokenizer, std::vector<int32_t> ends,
                           std::vector<std::string> stops, bool has_prompt)
    : tokenizer_(tokenizer), ends_(std::move(ends)), stops_(std::move(stops)) {
  if (tokenizer) decoder_.emplace(*tokenizer, false, has_prompt);
}

bool Continuation::is_end(int32_t token) const {
  if (!ends_.empty()) return std::ranges::find(ends_, token) != ends_.end();
  if (!tokenizer_) return token >= kBos;
  return token >= tokenizer_->vocab() || tokenizer_->is_special(token);
}

std::string Continuation::add(int32_t token) {
  return add_text(decoder_ ? decoder_->add(token) : std::string(1, char(token)));
}

std::string Continuation::rest() {
  std::string last = decoder_ ? add_text(decoder_->rest()) : "";
  return last += stops_.rest();
}

std::string Continuation::add_text(const std::string& text) {
  std::string result;
  for (size_t i = 0; i < text.size() && !stops_.stop(); ++i) result += stops_.add(text[i]);
  return result;
}

}  // namespace tandem
