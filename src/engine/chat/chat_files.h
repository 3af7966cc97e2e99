// Files next to a tokenizer that write a model's chats.
#pragma once

#include <string>

namespace tandem {

/// Folder of the tokenizer that `path` names: the folder itself, or that of the file.
std::string folder_of_tokenizer(const std::string& path);
/// Copies chat_template.jinja and tokenizer_config.json, those that `from` has. Throws IoError.
void copy_chat_files(const std::string& from, const std::string& to);

}  // namespace tandem
