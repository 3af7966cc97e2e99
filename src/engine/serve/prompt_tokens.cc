#include "engine/serve/prompt_tokens.h"

#include <fmt/format.h>

#include "core/system/files.h"
#include "engine/serve/tool_calls.h"
#include "engine/tokenizer/tokenizer.h"
#include "tandem/error.h"

namespace tandem {

int64_t min_tokens(const StoredModel& stored, size_t bytes) {
  int64_t max = stored.tokenizer ? stored.tokenizer->max_bytes_per_token() : 1;
  if (max == 0) max = kMaxBytesOfDroppedText;
  return (int64_t(bytes) + max - 1) / max;
}

std::vector<int32_t> make_prompt(const StoredModel& stored, const std::string& text) {
  std::vector<int32_t> tokens;
  if (!stored.tokenizer) {
    ByteTokenizer().append(text, tokens);
    return tokens;
  }
  const TextTokenizer& tokenizer = *stored.tokenizer;
  const bool begins =
      tokenizer.adds_before() || text.empty() || path_exists(stored.directory + "/state.json");
  begins ? tokenizer.append(text, tokens) : tokenizer.append_text(text, tokens);
  return tokens;
}

std::vector<int32_t> make_chat_prompt(const StoredModel& stored, const std::string& text) {
  std::vector<int32_t> tokens;
  stored.tokenizer->append_text(text, tokens);
  return tokens;
}

std::vector<int32_t> call_marker_tokens(const StoredModel& stored) {
  std::vector<int32_t> tokens;
  for (const std::string_view marker : tool_call_markers()) {
    std::vector<int32_t> encoded;
    if (stored.tokenizer) stored.tokenizer->append_more(marker, encoded);
    if (encoded.size() == 1) tokens.push_back(encoded[0]);
  }
  return tokens;
}

ChatTemplate open_chat_template(const StoredModel& stored) {
  if (!stored.tokenizer) {
    throw NoChatTemplate(
        fmt::format("{}: no tokenizer: a chat is expected of a model with one", stored.directory));
  }
  return {stored.side, stored.tokenizer->special_tokens()};
}

}  // namespace tandem
