// Files next to a model's weights that its tokenizer, its chats and generation read:
// added_tokens.json, tokenizer_config.json, special_tokens_map.json, generation_config.json and the
// templates of chats.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

namespace tandem {

/// Token that is found in a text as a whole.
struct SideToken {
  std::string content;  ///< not empty
  int32_t id = -1;      ///< -1: as the tokenizer's file has it
  bool is_special = false;
  bool takes_before = false;   ///< "lstrip"
  bool takes_after = false;    ///< "rstrip"
  bool is_normalized = false;  ///< found in normalized text
  bool is_single_word = false;
};

struct ChatTemplateText {
  std::string file;  ///< for messages, with the key in it
  std::string text;
};

struct SideFiles {
  std::string folder;
  std::vector<SideToken> added;
  /// Texts of bos_token, eos_token, …; empty: the files say that there is none.
  std::map<std::string, std::string> special_tokens;
  std::map<std::string, ChatTemplateText> templates;  ///< by name: "default", "tool_use", …
  /// Keys of tokenizer_config.json for files that do not say this themselves, if it has them.
  std::optional<bool> adds_bos, adds_eos, is_legacy, adds_prefix_space;
  std::string tokenizer_class;  ///< of tokenizer_config.json; empty: none
  bool has_tokenizer_config = false;
  nlohmann::ordered_json generation;  ///< generation_config.json, an object; null without it
};

/// Reads what of these files a folder has, as transformers does:
/// - added tokens: added_tokens_decoder of tokenizer_config.json, then added_tokens.json, then the
///   special tokens, without a number;
/// - special tokens: those of tokenizer_config.json, over special_tokens_map.json if it has an
///   added_tokens_decoder, else below it;
/// - templates: chat_template.jinja and additional_chat_templates/*.jinja; without them
///   chat_template of tokenizer_config.json, a text or a list of named ones; else that of
///   chat_template.json.
/// Throws IoError for a file that cannot be read, and ConfigError naming the file, the key and what
/// is expected.
SideFiles read_side_files(const std::string& folder);
/// Keys of config.json and generation_config.json for tokens.
inline constexpr const char* kTokenIds[] = {"bos_token_id", "eos_token_id", "pad_token_id"};

/// Copies these files, as they are; in place of a generation_config.json that there is not, one of
/// the tokens that config.json names, as transformers makes it. Throws IoError.
void copy_side_files(const std::string& from, const std::string& to);

}  // namespace tandem
