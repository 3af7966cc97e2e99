#include "engine/tokenizer/open.h"

#include <fmt/format.h>

#include <filesystem>
#include <utility>

#include "core/system/files.h"
#include "tandem/error.h"

namespace tandem {
namespace {

constexpr const char* kVocabFile = "vocab.json";
/// An id may be so many times larger than a file has tokens, as ids may have gaps.
constexpr int64_t kMaxSparsity = 4;
constexpr int64_t kMinIds = 4096;

TokenizerSpec parse(std::string_view text, const std::string& name) {
  if (name.ends_with(".json")) {
    return name.starts_with("tekken") ? parse_tekken(text) : parse_tokenizer_json(text);
  }
  // A SentencePiece model begins with the field of its first piece.
  if (text.starts_with('\n')) return parse_sentencepiece(text);
  if (text.starts_with('{')) return parse_tokenizer_json(text);
  return parse_tiktoken(text, name);
}

std::string file_name(const std::string& path) {
  return std::filesystem::path(path).filename().string();
}

/// The file itself, or that in a folder.
std::string resolve(const std::string& path) {
  if (std::error_code error; !std::filesystem::is_directory(path, error)) return path;
  const std::string name = find_tokenizer(path);
  if (!name.empty()) return path + "/" + name;
  throw IoError(fmt::format(
      "{}: expected a tokenizer.json, tekken.json, tokenizer.model, vocab.json with merges.txt, or "
      ".tiktoken in it",
      path));
}

std::string read_tokenizer(const std::string& file) {
  if (file_name(file) == kVocabFile) return make_tokenizer_json(folder_of_tokenizer(file));
  return read_small_file(file, kMaxTokenizerFile);
}

}  // namespace

int64_t max_token_id(size_t tokens) {
  return kMinIds + kMaxSparsity * int64_t(tokens);
}

void add_token_text(TokenizerSpec& spec, int32_t id, std::string bytes, bool is_special) {
  if (spec.texts.size() <= size_t(id)) spec.texts.resize(size_t(id) + 1);
  TokenText& text = spec.texts[size_t(id)];
  text.bytes = std::move(bytes);
  text.is_token = true;
  text.is_special = is_special;
}

std::string find_tokenizer(const std::string& directory) {
  for (const char* name : {"tokenizer.json", "tekken.json", "tokenizer.model"}) {
    if (path_exists(directory + "/" + name)) return name;
  }
  const std::string vocab = directory + "/" + kVocabFile;
  if (path_exists(vocab) && path_exists(directory + "/merges.txt")) return kVocabFile;
  std::string found;
  for (const std::string& name : names_in(directory)) {
    if (!name.ends_with(".tiktoken")) continue;
    if (!found.empty()) {
      throw ConfigError(fmt::format("{}: holds {} and {}: expected one", directory, found, name));
    }
    found = name;
  }
  return found;
}

std::shared_ptr<const TextTokenizer> open_tokenizer(const std::string& path, int64_t model_vocab) {
  const std::string file = resolve(path);
  const std::string text = read_tokenizer(file);
  try {
    TokenizerSpec spec = parse(text, file_name(file));
    if (file != path) add_side_tokens(read_side_files(path), spec);
    spec.name += " " + content_hash(text);
    spec.max_vocab = model_vocab;
    return std::make_shared<TextTokenizer>(std::move(spec));
  } catch (const ConfigError& failed) {
    throw ConfigError(fmt::format("{}: {}", file, failed.what()));
  }
}

std::string folder_of_tokenizer(const std::string& path) {
  if (std::error_code error; std::filesystem::is_directory(path, error)) return path;
  const std::string folder = std::filesystem::path(path).parent_path();
  return folder.empty() ? "." : folder;
}

void copy_tokenizer(const std::string& path, const std::string& directory) {
  const std::string file = resolve(path);
  const std::string text = read_tokenizer(file);
  std::string name = file_name(file);
  if (name.ends_with(".json") || text.starts_with('{')) {
    name = name.starts_with("tekken") ? "tekken.json" : "tokenizer.json";
  } else if (text.starts_with('\n')) {
    name = "tokenizer.model";
  } else if (!name.ends_with(".tiktoken") && name != "tokenizer.model") {
    name += ".tiktoken";
  }
  replace_file(directory + "/" + name, text);
  if (file != path) copy_side_files(path, directory);
}

}  // namespace tandem
