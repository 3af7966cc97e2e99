// Files of tokenizers.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "engine/model/side_files.h"
#include "engine/tokenizer/text_tokenizer.h"

namespace tandem {

constexpr size_t kMaxTokenizerFile = size_t(256) << 20;

/// Opens a file, or in a folder the first of tokenizer.json, tekken.json, tokenizer.model,
/// vocab.json with merges.txt, and the only *.tiktoken, with the added tokens of the files next to
/// it (side_files.h):
/// - Hugging Face's tokenizer.json with a BPE model, of bytes or with byte fallback, or a unigram
///   model;
/// - Mistral's tekken.json;
/// - SentencePiece's .model of type BPE or unigram;
/// - vocab.json, next to merges.txt, of GPT-2's, GPT-NeoX's or Qwen's tokenizer class;
/// - tiktoken's ranks: lines of a token in base64 and its number. The words and special tokens that
///   they are for follow from the file's name (tiktoken.cc).
/// Throws IoError for a file that cannot be read and ConfigError for one that is not understood,
/// naming what in it.
/// `model_vocab`: tokens that the model has an embedding of, so that others are refused in texts;
/// 0: all.
std::shared_ptr<const TextTokenizer> open_tokenizer(const std::string& path,
                                                    int64_t model_vocab = 0);
/// Name of the tokenizer's file in a folder; empty if there is none.
std::string find_tokenizer(const std::string& directory);
/// Folder of the tokenizer that `path` names: the folder itself, or that of the file.
std::string folder_of_tokenizer(const std::string& path);
/// Copies what open_tokenizer(path) reads into a folder, a file by a name under which it is found
/// there, vocab.json and merges.txt as a tokenizer.json, and the side files of a folder. Throws
/// IoError.
void copy_tokenizer(const std::string& path, const std::string& directory);

/// vocab.json and merges.txt of a folder as a tokenizer.json: how the class that
/// tokenizer_config.json names, or else the model_type of config.json has, divides words. Throws
/// IoError, and ConfigError naming the file and, for another class, the command that writes a
/// tokenizer.json.
std::string make_tokenizer_json(const std::string& folder);

// Readers of a file's content. Throw ConfigError without the file's name.
TokenizerSpec parse_tokenizer_json(std::string_view text);
TokenizerSpec parse_tekken(std::string_view text);
/// `name`: of the file.
TokenizerSpec parse_tiktoken(std::string_view text, std::string_view name);
TokenizerSpec parse_sentencepiece(std::string_view text);

/// Adds the tokens that the side files name and a text holds as a whole, and the roles of special
/// ones. Throws ConfigError naming the token.
void add_side_tokens(const SideFiles& side, TokenizerSpec& spec);

/// Largest number of a token that a file of so many tokens may have.
int64_t max_token_id(size_t tokens);
/// Sets the text of a token; `id` is at most max_token_id.
void add_token_text(TokenizerSpec& spec, int32_t id, std::string bytes, bool is_special);

}  // namespace tandem
