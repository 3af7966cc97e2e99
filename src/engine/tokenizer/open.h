// Files of tokenizers.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "engine/tokenizer/text_tokenizer.h"

namespace tandem {

/// Opens a file, or in a folder the first of tokenizer.json, tekken.json, tokenizer.model and
/// the only *.tiktoken:
/// - Hugging Face's tokenizer.json with a BPE model, of bytes or with byte fallback, or a unigram
///   model;
/// - Mistral's tekken.json;
/// - SentencePiece's .model of type BPE or unigram;
/// - tiktoken's ranks: lines of a token in base64 and its number. The words and special tokens that
///   they are for follow from the file's name (tiktoken.cc).
/// Throws IoError for a file that cannot be read and ConfigError for one that is not understood,
/// naming what in it.
std::shared_ptr<const TextTokenizer> open_tokenizer(const std::string& path);
/// Name of the tokenizer's file in a folder; empty if there is none.
std::string find_tokenizer(const std::string& directory);
/// Copies the file that open_tokenizer(path) reads into a folder, by a name under which it is found
/// there. Throws IoError.
void copy_tokenizer(const std::string& path, const std::string& directory);

// Readers of a file's content. Throw ConfigError without the file's name.
TokenizerSpec parse_tokenizer_json(std::string_view text);
TokenizerSpec parse_tekken(std::string_view text);
/// `name`: of the file.
TokenizerSpec parse_tiktoken(std::string_view text, std::string_view name);
TokenizerSpec parse_sentencepiece(std::string_view text);

/// Largest number of a token that a file of so many tokens may have.
int64_t max_token_id(size_t tokens);
/// Sets the text of a token; `id` is at most max_token_id.
void add_token_text(TokenizerSpec& spec, int32_t id, std::string bytes, bool is_special);

}  // namespace tandem
