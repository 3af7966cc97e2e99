#include "engine/chat/chat_files.h"

#include <filesystem>
#include <system_error>

#include "core/files.h"

namespace tandem {

std::string folder_of_tokenizer(const std::string& path) {
  if (std::error_code error; std::filesystem::is_directory(path, error)) return path;
  const std::string folder = std::filesystem::path(path).parent_path();
  return folder.empty() ? "." : folder;
}

void copy_chat_files(const std::string& from, const std::string& to) {
  for (const char* name : {"/chat_template.jinja", "/tokenizer_config.json"}) {
    if (path_exists(from + name)) replace_file(to + name, read_file(from + name));
  }
}

}  // namespace tandem
