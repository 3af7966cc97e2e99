// GPT-2's vocab.json and merges.txt, whose pre-tokenizer only the class of their tokenizer says.
#include <fmt/format.h>

#include <algorithm>
#include <string_view>
#include <utility>
#include <vector>

#include "core/system/files.h"
#include "core/system/json.h"
#include "core/system/printable.h"
#include "engine/tokenizer/json_field.h"
#include "engine/tokenizer/open.h"
#include "tandem/error.h"

namespace tandem {
namespace {

using nlohmann::json;

constexpr std::string_view kFast = "Fast";
constexpr const char* kEndOfText = "<|endoftext|>";  // special without a word of it in a file

/// Tokenizer of byte-level BPE in transformers: how it divides words.
struct TokenizerClass {
  std::string_view name;
  const char* words;       ///< pattern; nullptr: GPT-2's
  bool has_nfc;            ///< normalizes
  std::string_view model;  ///< begin of the model_type that has it where no file names a class
};

constexpr const char* kQwen2Words =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*)"
    R"(|\s*[\r\n]+|\s+(?!\S)|\s+)";

constexpr TokenizerClass kClasses[] = {
    {"GPTNeoXTokenizer", nullptr, true, "gpt_neox"},
    {"GPT2Tokenizer", nullptr, false, "gpt"},
    {"GPT2Tokenizer", nullptr, false, "opt"},
    {"GPT2Tokenizer", nullptr, false, "starcoder2"},
    {"CodeGenTokenizer", nullptr, false, "codegen"},
    {"GPTNeoXTokenizer", nullptr, true, "olmo"},
    {"Qwen2Tokenizer", kQwen2Words, true, "qwen2"},
    {"Qwen2Tokenizer", kQwen2Words, true, "qwen3"},
};

json read_json(const std::string& file) {
  json root = parse_json<json>(read_small_file(file, kMaxTokenizerFile));
  if (!root.is_object()) throw ConfigError(file + ": expected a JSON object");
  return root;
}

[[noreturn]] void refuse_class(const std::string& folder, const std::string& found) {
  throw ConfigError(
      fmt::format("{0}/vocab.json: {1}: expected GPT2Tokenizer, CodeGenTokenizer, GPTNeoXTokenizer "
                  "or Qwen2Tokenizer, or a tokenizer.json, which python3 -c \"import sys, "
                  "transformers as t; t.AutoTokenizer.from_pretrained(sys.argv[1])"
                  ".save_pretrained(sys.argv[1])\" {2} writes",
                  folder, found, shell_quote(folder)));
}

/// By the class that a file names, or else by the model.
const TokenizerClass& find_class(const SideFiles& side) {
  std::string_view name = side.tokenizer_class;
  if (name.ends_with(kFast)) name.remove_suffix(kFast.size());
  if (!name.empty()) {
    const auto found = std::ranges::find(kClasses, name, &TokenizerClass::name);
    if (found != std::end(kClasses)) return *found;
    refuse_class(side.folder, "tokenizer_class is " + printable(side.tokenizer_class));
  }
  const std::string config = side.folder + "/config.json";
  const json root = path_exists(config) ? read_json(config) : json::object();
  const json& type = member(root, "model_type");
  const std::string model = type.is_string() ? type.get<std::string>() : "";
  const auto found = std::ranges::find_if(
      kClasses, [&](const TokenizerClass& each) { return model.starts_with(each.model); });
  if (found != std::end(kClasses)) return *found;
  refuse_class(side.folder, "no tokenizer_class in tokenizer_config.json");
}

json split_merges(const std::string& text) {
  json merges = json::array();
  for (std::string_view rest = text; !rest.empty();) {
    const size_t end = std::min(rest.find('\n'), rest.size());
    std::string_view line = rest.substr(0, end);
    rest.remove_prefix(std::min(end + 1, rest.size()));
    if (line.ends_with('\r')) line.remove_suffix(1);
    const bool is_header = merges.empty() && line.starts_with("#version");
    if (!line.empty() && !is_header) merges.push_back(line);
  }
  return merges;
}

json make_pre_tokenizer(const TokenizerClass& of, bool adds_space) {
  json bytes{{"type", "ByteLevel"},
             {"add_prefix_space", adds_space},
             {"trim_offsets", true},
             {"use_regex", !of.words}};
  if (!of.words) return bytes;
  const json split{{"type", "Split"},
                   {"pattern", {{"Regex", of.words}}},
                   {"behavior", "Isolated"},
                   {"invert", false}};
  return {{"type", "Sequence"}, {"pretokenizers", {split, bytes}}};
}

/// Tokens that texts hold as a whole; one without a number is left out.
json make_added(const SideFiles& side, const json& vocab) {
  std::vector<SideToken> tokens = side.added;
  const auto is_end = [](const SideToken& token) { return token.content == kEndOfText; };
  if (std::ranges::none_of(tokens, is_end)) {
    tokens.push_back({.content = kEndOfText, .is_special = true});
  }
  json added = json::array();
  for (const SideToken& token : tokens) {
    const auto known = vocab.find(token.content);
    if (known == vocab.end() && token.id < 0) continue;
    added.push_back({{"id", known == vocab.end() ? json(token.id) : *known},
                     {"content", token.content},
                     {"single_word", token.is_single_word},
                     {"lstrip", token.takes_before},
                     {"rstrip", token.takes_after},
                     {"normalized", token.is_normalized},
                     {"special", token.is_special}});
  }
  return added;
}

/// Template of the tokens around a text, where the files ask for some; else null.
json make_template(const SideFiles& side, const json& added) {
  json single = json::array(), special = json::object();
  const auto add = [&](const char* role, std::optional<bool> is_on) {
    if (!is_on.value_or(false)) return;
    const auto named = side.special_tokens.find(role);
    const std::string name = named == side.special_tokens.end() ? kEndOfText : named->second;
    const auto token =
        std::ranges::find_if(added, [&](const json& each) { return each["content"] == name; });
    if (token == added.end()) return;
    single.push_back({{"SpecialToken", {{"id", name}, {"type_id", 0}}}});
    special[name] = {{"id", name}, {"ids", {(*token)["id"]}}, {"tokens", {name}}};
  };
  add("bos_token", side.adds_bos);
  single.push_back({{"Sequence", {{"id", "A"}, {"type_id", 0}}}});
  add("eos_token", side.adds_eos);
  if (special.empty()) return nullptr;
  return {{"type", "TemplateProcessing"},
          {"single", single},
          {"pair", json::array()},
          {"special_tokens", special}};
}

}  // namespace

std::string make_tokenizer_json(const std::string& folder) {
  const SideFiles side = read_side_files(folder);
  const TokenizerClass& of = find_class(side);
  const json vocab = read_json(folder + "/vocab.json");
  const json added = make_added(side, vocab);
  const std::string merges = read_small_file(folder + "/merges.txt", kMaxTokenizerFile);
  return dump_json(
      json{{"version", "1.0"},
           {"added_tokens", added},
           {"normalizer", of.has_nfc ? json{{"type", "NFC"}} : json()},
           {"pre_tokenizer", make_pre_tokenizer(of, side.adds_prefix_space.value_or(false))},
           {"post_processor", make_template(side, added)},
           {"decoder", {{"type", "ByteLevel"}}},
           {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", split_merges(merges)}}}});
}

}  // namespace tandem
