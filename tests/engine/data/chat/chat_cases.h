// Chats, and what transformers makes of them (chat/make.py).
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>

#include "core/system/files.h"
#include "tests/engine/train/temp_dir.h"

namespace tandem {

inline nlohmann::ordered_json chat_cases() {
  return nlohmann::ordered_json::parse(
      read_file(TANDEM_SOURCE_DIR "/tests/engine/data/chat/cases.json"));
}

/// Writes the tokenizer, its configuration and the template of a case.
inline void write_chat_tokenizer(const std::string& folder, const std::string& name,
                                 const nlohmann::ordered_json& expected) {
  std::filesystem::create_directories(folder);
  const std::string source = TANDEM_SOURCE_DIR "/tests/";
  std::filesystem::copy_file(
      source + (name == "mistral" ? "engine/tokenizer/data/small_fallback.json"
                                  : "../examples/chat/tokenizer.json"),
      folder + "/tokenizer.json");
  write_file(folder + "/tokenizer_config.json",
             nlohmann::ordered_json{{"bos_token", expected["bos_token"]},
                                    {"eos_token", expected["eos_token"]}}
                 .dump());
  write_bytes(folder + "/chat_template.jinja", expected["template"].get<std::string>());
}

inline void write_chats(const std::string& path, const nlohmann::ordered_json& expected) {
  std::string lines;
  for (const auto& chat : expected["chats"]) lines += chat["line"].dump() + "\n";
  write_bytes(path, lines);
}

}  // namespace tandem
