// Ranks of byte strings: tiktoken's files and Mistral's tekken.json.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/system/printable.h"
#include "engine/tokenizer/open.h"
#include "engine/tokenizer/ranked_tokens.h"
#include "engine/tokenizer/unicode/byte_characters.h"
#include "tandem/error.h"

namespace tandem {
namespace {

constexpr const char* kGpt2 =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
constexpr const char* kCl100k =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr const char* kO200k =
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr const char* kQwen =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr const char* kQwen35 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

/// Facts that a file of ranks does not hold.
struct KnownVocabulary {
  const char* name;  ///< the file's name begins with it
  const char* pattern;
  bool is_nfc;
  std::vector<const char*> special;  ///< numbered after the ranks
};

const std::vector<KnownVocabulary>& known_vocabularies() {
  static const std::vector<KnownVocabulary> known{
      {"gpt2", kGpt2, false, {"<|endoftext|>"}},
      {"r50k", kGpt2, false, {"<|endoftext|>"}},
      {"cl100k",
       kCl100k,
       false,
       {nullptr, "<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"}},
      {"o200k", kO200k, false, {nullptr, "<|endoftext|>"}},
      {"qwen3_", kQwen35, true, {"<|endoftext|>", "<|im_start|>", "<|im_end|>"}},
      {"qwen", kQwen, true, {"<|endoftext|>", "<|im_start|>", "<|im_end|>"}},
      {"tokenizer.model", kCl100k, false, {"<|begin_of_text|>", "<|end_of_text|>"}},  // Llama 3
  };
  return known;
}

const KnownVocabulary& known_vocabulary(std::string_view name) {
  for (const KnownVocabulary& known : known_vocabularies()) {
    if (name.starts_with(known.name)) return known;
  }
  std::string names;
  for (const KnownVocabulary& known : known_vocabularies()) {
    names += fmt::format("{}{}", names.empty() ? "" : ", ", known.name);
  }
  throw ConfigError(fmt::format(
      "the name does not say how ranks divide a text into words: expected one that begins with {}",
      names));
}

void add_special(TokenizerSpec& spec, int32_t id, const std::string& content) {
  spec.added.push_back({content, id, true});
  add_token_text(spec, id, content, true);
}

/// Takes `ranks` as the vocabulary, numbered from `first_id`.
void set_ranks(TokenizerSpec& spec, const std::vector<std::string>& ranks, int32_t first_id,
               const std::string& pattern) {
  std::vector<RankedToken> ranked;
  for (size_t i = 0; i < ranks.size(); ++i) {
    const auto id = first_id + int32_t(i);
    if (!spec.bpe.tokens.emplace(ranks[i], id).second) {
      throw ConfigError(fmt::format("rank {}: is a second one of the same bytes", i));
    }
    if (ranks[i].size() == 1) spec.bpe.bytes[uint8_t(ranks[i][0])] = id;
    ranked.push_back({ranks[i], id, int32_t(i)});
    add_token_text(spec, id, ranks[i], false);
  }
  spec.bpe.whole_words_first = true;
  spec.bpe.merges = merges_of_tokens(ranked, spec.bpe.tokens, false);
  spec.steps.push_back({WordStep::Kind::split, Pattern(pattern)});
}

}  // namespace

TokenizerSpec parse_tiktoken(std::string_view text, std::string_view name) {
  const KnownVocabulary& known = known_vocabulary(name);
  std::vector<std::string> ranks;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    std::string_view line = text.substr(begin, end - begin);
    begin = end + 1;
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (line.empty()) continue;
    const size_t space = line.find(' ');
    const auto bytes = bytes_of_base64(line.substr(0, space));
    size_t rank = 0;
    const std::string_view digits = space == line.npos ? "" : line.substr(space + 1);
    const auto parsed = std::from_chars(digits.data(), digits.data() + digits.size(), rank);
    const bool is_number = parsed.ec == std::errc() && parsed.ptr == digits.data() + digits.size();
    if (!bytes || !is_number || rank != ranks.size()) {
      throw ConfigError(fmt::format("line {} is {}: expected a token in base64 and the rank {}",
                                    ranks.size() + 1, printable(line, 60), ranks.size()));
    }
    ranks.push_back(*bytes);
  }
  TokenizerSpec spec;
  spec.name = fmt::format("tiktoken {}", known.name);
  set_ranks(spec, ranks, 0, known.pattern);
  if (known.is_nfc) spec.normalizations.push_back({Normalization::Kind::nfc});
  for (size_t i = 0; i < known.special.size(); ++i) {
    if (known.special[i]) add_special(spec, int32_t(ranks.size() + i), known.special[i]);
  }
  spec.separator = spec.added[0].id;
  return spec;
}

TokenizerSpec parse_tekken(std::string_view text) {
  using nlohmann::json;
  TokenizerSpec spec;
  spec.name = "tekken";
  try {
    const json root = json::parse(text);
    const json& config = root.at("config");
    const auto pattern = config.at("pattern").get<std::string>();
    const auto size = config.at("default_vocab_size").get<int64_t>();
    const auto special = config.at("default_num_special_tokens").get<int64_t>();
    const json& vocab = root.at("vocab");
    if (special < 3 || size <= special || size - special > int64_t(vocab.size())) {
      throw ConfigError(fmt::format(
          "config: default_vocab_size is {}, default_num_special_tokens {}: expected at least 3 "
          "special tokens and at most vocab's {} others",
          size, special, vocab.size()));
    }
    if (special > max_token_id(vocab.size())) {
      throw ConfigError(fmt::format("config.default_num_special_tokens is {}: expected at most {}",
                                    special, max_token_id(vocab.size())));
    }
    std::vector<std::string> ranks;
    for (int64_t i = 0; i < size - special; ++i) {
      const json& entry = vocab.at(size_t(i));
      const auto bytes = bytes_of_base64(entry.at("token_bytes").get<std::string>());
      if (!bytes || entry.at("rank") != i) {
        throw ConfigError(
            fmt::format("vocab[{}]: expected token_bytes in base64 and rank {}", i, i));
      }
      ranks.push_back(*bytes);
    }
    set_ranks(spec, ranks, int32_t(special), pattern);
  } catch (const json::exception& failed) {
    throw ConfigError(printable(failed.what(), 160));
  }
  for (size_t i = 0; i < 3; ++i) {
    constexpr const char* kNames[] = {"<unk>", "<s>", "</s>"};
    add_token_text(spec, int32_t(i), kNames[i], true);
  }
  spec.before = {1};
  spec.separator = 1;
  return spec;
}

}  // namespace tandem
