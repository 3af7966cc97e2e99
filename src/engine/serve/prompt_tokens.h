// Tokens of the texts and chats that a stored model continues.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/chat/chat_template.h"
#include "engine/checkpoint/stored_model.h"

namespace tandem {

/// Bytes a token of a text, at most on average, that a model takes whose tokenizer may drop text.
constexpr int64_t kMaxBytesOfDroppedText = 256;
/// Lower bound of the tokens of a text of so many bytes, known without encoding it; with a
/// tokenizer that may drop text, number of tokens that the text is taken for.
int64_t min_tokens(const StoredModel& stored, size_t bytes);
/// Tokens of a prompt. A model of another program that adds no token before a text is given none,
/// unless the text is empty.
std::vector<int32_t> make_prompt(const StoredModel& stored, const std::string& text);
/// Tokens of a chat's text, which has all tokens before a text that the model wants.
std::vector<int32_t> make_chat_prompt(const StoredModel& stored, const std::string& text);
/// Tokens that begin or divide calls of functions, which have a text although they are special.
std::vector<int32_t> call_marker_tokens(const StoredModel& stored);
/// The template of the model's folder. Throws NoChatTemplate if the model has none, or no
/// tokenizer.
ChatTemplate open_chat_template(const StoredModel& stored);

}  // namespace tandem
