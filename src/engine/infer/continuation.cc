#include "engine/infer/continuation.h"

#include <algorithm>
#include <utility>

#include "engine/model/config.h"

namespace tandem {
namespace {

bool has(const std::vector<int32_t>& tokens, int32_t token) {
  return std::ranges::find(tokens, token) != tokens.end();
}

}  // namespace

Continuation::Continuation(const TextTokenizer* tokenizer, TextOptions options)
    : tokenizer_(tokenizer), options_(std::move(options)), stops_(options_.stops) {
  if (tokenizer) decoder_.emplace(*tokenizer, false, options_.has_text_before);
}

bool Continuation::is_end(int32_t token) const {
  if (has(options_.stop_token_ids, token)) return true;
  if (!options_.eos_token_ids.empty()) return has(options_.eos_token_ids, token);
  if (!tokenizer_) return token >= kBos;
  return token >= tokenizer_->vocab() || tokenizer_->is_special(token);
}

bool Continuation::is_hidden(int32_t token) const {
  if (!tokenizer_) return token >= kBos;
  return options_.hides_special && tokenizer_->is_special(token) && !has(options_.shown, token);
}

std::string Continuation::add(int32_t token) {
  if (is_hidden(token)) return "";
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
