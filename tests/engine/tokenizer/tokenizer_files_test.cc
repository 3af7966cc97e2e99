// Files that are not understood, damaged or lie.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "core/system/files.h"
#include "engine/tokenizer/open.h"
#include "tandem/error.h"
#include "tests/engine/train/temp_dir.h"

namespace tandem {
namespace {

using nlohmann::json;
using testing::HasSubstr;

constexpr const char* kFiles[] = {
    "small_bytes.json",    "small_fallback.json",   "small.model",      "small_unigram.json",
    "small_unigram.model", "cl100k_small.tiktoken", "tekken_small.json"};

std::string data(const std::string& name) {
  return std::string(TANDEM_TEST_DATA) + "/" + name;
}

void expect_refused(const std::string& path, const std::string& message) {
  try {
    open_tokenizer(path);
    ADD_FAILURE() << path << " is accepted: expected " << message;
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr(message));
    EXPECT_THAT(error.what(), HasSubstr(path));
  }
}

struct Edit {
  const char* message;
  std::function<void(json&)> change;
};

TEST(TokenizerJson, NamesWhatIsNotUnderstood) {
  const Edit edits[] = {
      {"model.type is \"WordPiece\": expected BPE or Unigram",
       [](json& j) { j["model"]["type"] = "WordPiece"; }},
      {"expected no ByteLevel of Unigram", [](json& j) { j["model"]["type"] = "Unigram"; }},
      {"normalizer.type is \"BertNormalizer\": expected NFC",
       [](json& j) {
         j["normalizer"] = {{"type", "BertNormalizer"}};
       }},
      {"normalizer.type is null", [](json& j) { j["normalizer"] = json::object(); }},
      {"model.dropout is 0.1: expected null", [](json& j) { j["model"]["dropout"] = 0.1; }},
      {"model.end_of_word_suffix is \"</w>\"",
       [](json& j) { j["model"]["end_of_word_suffix"] = "</w>"; }},
      {"pre_tokenizer.type is \"UnicodeScripts\"",
       [](json& j) {
         j["pre_tokenizer"] = {{"type", "UnicodeScripts"}};
       }},
      {"pre_tokenizer.pretokenizers[0].behavior is \"Odd\": expected Contiguous",
       [](json& j) { j["pre_tokenizer"]["pretokenizers"][0]["behavior"] = "Odd"; }},
      {"pre_tokenizer.pretokenizers[0].pattern: pattern \\w+: the escape \\w at byte 2 is not "
       "supported",
       [](json& j) {
         j["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {{"Regex", "\\w+"}};
       }},
      {"post_processor.processors[1].type is \"BertProcessing\"",
       [](json& j) { j["post_processor"]["processors"][1]["type"] = "BertProcessing"; }},
      {"decoder is null: expected a decoder", [](json& j) { j["decoder"] = nullptr; }},
      {"decoder.type is \"WordPiece\"",
       [](json& j) {
         j["decoder"] = {{"type", "WordPiece"}};
       }},
      {"decoder is {\"type\":\"Fuse\"}: expected ByteLevel",
       [](json& j) {
         j["decoder"] = {{"type", "Fuse"}};
       }},
      {"added_tokens[0].id is 5: expected its number",
       [](json& j) { j["added_tokens"][0]["content"] = "a", j["added_tokens"][0]["id"] = 5; }},
      {"added_tokens[0].content is \"\"", [](json& j) { j["added_tokens"][0]["content"] = ""; }},
      {"added_tokens[0].id is 99999999", [](json& j) { j["added_tokens"][0]["id"] = 99999999; }},
      {"model.vocab[\"x\"] is -1", [](json& j) { j["model"]["vocab"]["x"] = -1; }},
      {"model.vocab[\"x\"] is 99999999", [](json& j) { j["model"]["vocab"]["x"] = 99999999; }},
      {"has no token for byte 0x61",
       [](json& j) { j["model"]["vocab"].erase("a"), j["model"]["merges"] = json::array(); }},
      {"model.merges[0]: \"qqq\" is not in model.vocab",
       [](json& j) {
         j["model"]["merges"] = json::array({json::array({"qqq", "a"})});
       }},
      {"model.merges[0] is \"a b c\": expected two tokens",
       [](json& j) { j["model"]["merges"] = json::array({"a b c"}); }},
      {"model.merges[0] is [1,2]: expected two tokens",
       [](json& j) {
         j["model"]["merges"] = json::array({json::array({1, 2})});
       }},
      {"model.vocab is null: expected an object", [](json& j) { j["model"].erase("vocab"); }}};
  const TempDir dir;
  const json sound = json::parse(read_file(data("small_bytes.json")));
  const std::string path = dir / "tokenizer.json";
  for (const Edit& edit : edits) {
    json changed = sound;
    edit.change(changed);
    write_bytes(path, changed.dump());
    expect_refused(path, edit.message);
  }
  write_bytes(path, sound.dump());
  EXPECT_EQ(open_tokenizer(dir.path())->vocab(), open_tokenizer(data("small_bytes.json"))->vocab());
}

TEST(TokenizerJson, NamesWhatIsNotUnderstoodOfAUnigramModel) {
  const auto normalizer = [](json& j, const json& map) {
    j["normalizer"] = {{"type", "Precompiled"}, {"precompiled_charsmap", map}};
  };
  const Edit edits[] = {
      {"model.unk_id is null: expected a piece", [](json& j) { j["model"]["unk_id"] = nullptr; }},
      {"model.unk_id is 99999: expected a piece", [](json& j) { j["model"]["unk_id"] = 99999; }},
      {"model.vocab[5] is [\"x\"]: expected a text and its score",
       [](json& j) { j["model"]["vocab"][5] = json::array({"x"}); }},
      {"model.vocab is {}: expected a list", [](json& j) { j["model"]["vocab"] = json::object(); }},
      {"normalizer.precompiled_charsmap is null: expected a text",
       [&](json& j) { normalizer(j, nullptr); }},
      {"normalizer.precompiled_charsmap is \"*\": expected a map in base64",
       [&](json& j) { normalizer(j, "*"); }},
      {"precompiled_charsmap has 3 bytes and a trie of 0", [&](json& j) { normalizer(j, "AAAA"); }},
      {"precompiled_charsmap has 6 bytes and a trie of 4096",
       [&](json& j) { normalizer(j, "ABAAAAAA"); }},
      {"precompiled_charsmap has a text of 301 bytes", [&](json& j) {
         std::string map = "BAAAAAAAAAAA";  // a trie of one unit
         for (int i = 0; i < 99; ++i) map += "YWFh";
         normalizer(j, map + "YWFhYQ==");
       }}};
  const TempDir dir;
  const json sound = json::parse(read_file(data("small_unigram.json")));
  for (const Edit& edit : edits) {
    json changed = sound;
    edit.change(changed);
    write_bytes(dir / "tokenizer.json", changed.dump());
    expect_refused(dir / "tokenizer.json", edit.message);
  }
}

TEST(SentencepieceModel, NamesWhatIsNotUnderstood) {
  const std::pair<std::string, const char*> fields[] = {
      {"\x12\x02\x18\x03", "trainer_spec.model_type is 3: expected 1 (unigram) or 2 (BPE)"},
      {"\x1a\x05\x12\x03"
       "abc",
       "precompiled_charsmap has 3 bytes and a trie of 0"},
      {"\x2a\x05\x12\x03"
       "abc",
       "denormalizer_spec.precompiled_charsmap has a map"},
      {"\x0a\x05\x0a\x01"
       "q\x18\x07",
       "has the type 7: expected 1 to 6"},
      {"\x0a\x08\x0a\x06<tool>", "<tool> is in it twice"}};
  const TempDir dir;
  for (const auto& [field, message] : fields) {
    write_bytes(dir / "x.model", read_file(data("small_unigram.model")) + field);
    expect_refused(dir / "x.model", message);
  }
}

TEST(TokenizerFiles, NamesWhatIsWrong) {
  const TempDir dir;
  expect_refused(dir / "missing.json", "missing.json");
  expect_refused(dir.path(),
                 "expected a tokenizer.json, tekken.json, tokenizer.model, vocab.json with");
  write_bytes(dir / "my.tiktoken", "YQ== 0\n");
  expect_refused(dir / "my.tiktoken", "the name does not say how ranks divide a text");
  write_bytes(dir / "cl100k.tiktoken", "YQ== 0\nYg== 2\n");
  expect_refused(dir / "cl100k.tiktoken",
                 "line 2 is Yg== 2: expected a token in base64 and the rank 1");
  expect_refused(dir.path(), "holds cl100k.tiktoken and my.tiktoken: expected one");
  write_bytes(dir / "cl100k.tiktoken", "YQ== 0\nYQ== 1\n");
  expect_refused(dir / "cl100k.tiktoken", "rank 1: is a second one of the same bytes");
  write_bytes(dir / "x.model", "\n\x7f");
  expect_refused(dir / "x.model", "model: is damaged at byte 2");
  json tekken = json::parse(read_file(data("tekken_small.json")));
  tekken["config"]["default_vocab_size"] = 100000;
  write_bytes(dir / "tekken.json", tekken.dump());
  expect_refused(dir / "tekken.json", "config: default_vocab_size is 100000");
}

/// Changes some bytes, or removes, repeats or exchanges a part.
std::string damage(std::string text, std::mt19937& random) {
  const auto at = [&] { return size_t(random()) % text.size(); };
  for (uint32_t i = 1 + random() % 3; i > 0 && !text.empty(); --i) {
    const size_t begin = at(), size = std::min<size_t>(1 + random() % 40, text.size() - begin);
    switch (random() % 6) {
      case 0:
        text[begin] = char(random());
        break;
      case 1:
        text[begin] = char(uint8_t(text[begin]) ^ 1u << random() % 8);
        break;
      case 2:
        text.erase(begin, size);
        break;
      case 3:
        text.insert(at(), text.substr(begin, size));
        break;
      case 4:
        text.resize(begin);
        break;
      case 5:
        text[begin] = "0123456789-{}[]\",:\\"[random() % 19];
        break;
    }
  }
  return text;
}

/// Replaces a value anywhere in the JSON text.
std::string lie(const json& sound, std::mt19937& random) {
  static const json kValues[] = {nullptr,
                                 true,
                                 -1,
                                 0,
                                 1e300,
                                 4294967296,
                                 9223372036854775807,
                                 "",
                                 "a",
                                 "\\p{L}+|.",
                                 json::array(),
                                 json::object(),
                                 json::array({1, "x"})};
  json changed = sound;
  json* value = &changed;
  for (int depth = 0; depth < 6 && value->is_structured() && !value->empty(); ++depth) {
    if (depth > 0 && random() % 3 == 0) break;
    auto child = value->begin();
    std::advance(child, long(random() % std::min<size_t>(value->size(), 200)));
    value = &*child;
  }
  *value = kValues[random() % std::size(kValues)];
  return changed.dump();
}

TokenizerSpec parse(const std::string& name, const std::string& text) {
  if (name.ends_with(".model")) return parse_sentencepiece(text);
  if (name.ends_with(".tiktoken")) return parse_tiktoken(text, name);
  return name.starts_with("tekken") ? parse_tekken(text) : parse_tokenizer_json(text);
}

/// Number of files that are refused of `count`; the others must encode and decode.
int refused(const std::string& name, const std::function<std::string()>& make, int count) {
  int refusals = 0;
  for (int i = 0; i < count; ++i) {
    try {
      const TextTokenizer tokenizer(parse(name, make()));
      std::vector<int32_t> tokens;
      tokenizer.encode("Hello, \u20ac 12345 e\u0301<tool> \n\n x\xff", true, tokens);
      EXPECT_LT(tokenizer.decode(tokens, false).size(), 100'000u);
      for (const int32_t token : tokens) EXPECT_LT(token, tokenizer.vocab());
    } catch (const InvalidArgument& error) {
      ++refusals;
      EXPECT_THAT(error.what(), testing::Not(HasSubstr("\n")));
      EXPECT_LT(std::string_view(error.what()).size(), 600u);
    }
  }
  return refusals;
}

void expect_safe(int damaged, int lying) {
  std::mt19937 random(11);
  for (const std::string name : kFiles) {
    const std::string sound = read_file(data(name));
    EXPECT_GT(refused(
                  name, [&] { return damage(sound, random); }, damaged),
              damaged / 10)
        << name;
    if (!name.ends_with(".json")) continue;
    const json root = json::parse(sound);
    EXPECT_GT(refused(
                  name, [&] { return lie(root, random); }, lying),
              lying / 10)
        << name;
  }
}

std::vector<int32_t> tokens_of(const TextTokenizer& tokenizer, std::string_view text) {
  std::vector<int32_t> tokens;
  tokenizer.encode(text, false, tokens);
  return tokens;
}

TEST(TokenizerJson, TruncationAndPaddingAreNoted) {
  const TempDir dir;
  const std::string sound = data("small_bytes.json"), path = dir / "tokenizer.json";
  json changed = json::parse(read_file(sound));
  changed["truncation"] = {{"max_length", 1}, {"stride", 0}};
  changed["padding"] = {{"strategy", {{"Fixed", 8}}}};
  write_bytes(path, changed.dump());
  const auto tokenizer = open_tokenizer(path);
  EXPECT_THAT(tokenizer->notes(),
              testing::ElementsAre("truncation is not applied", "padding is not applied"));
  EXPECT_EQ(tokens_of(*tokenizer, "Hello, world"),
            tokens_of(*open_tokenizer(sound), "Hello, world"));
}

/// Folder of a SentencePiece model with files next to it, by name.
class SideFolder {
 public:
  explicit SideFolder(const std::vector<std::pair<std::string, json>>& files) {
    write_bytes(dir_ / "tokenizer.model", read_file(data("small.model")));
    for (const auto& [name, content] : files) write_bytes(dir_ / name, content.dump());
  }
  std::string path() const { return dir_.path(); }
  std::shared_ptr<const TextTokenizer> open() const { return open_tokenizer(dir_.path()); }

 private:
  TempDir dir_;
};

TEST(SideFiles, AddedTokensOfSentencepieceAreFoundInTexts) {
  const auto bare = open_tokenizer(data("small.model"));
  const auto first = int32_t(bare->vocab());
  const json added{{"<|im_start|>", first}, {"<|im_end|>", first + 1}};
  const json decoder{{std::to_string(first), {{"content", "<|im_start|>"}, {"special", true}}},
                     {std::to_string(first + 1),
                      {{"content", "<|im_end|>"}, {"special", true}, {"rstrip", true}}}};
  const json config{{"bos_token", "<s>"},
                    {"eos_token", "<|im_end|>"},
                    {"additional_special_tokens", json::array({"<|im_start|>"})},
                    {"legacy", false}};
  json both = config;
  both["added_tokens_decoder"] = decoder;
  const SideFolder by_names({{"added_tokens.json", added}, {"tokenizer_config.json", config}});
  const SideFolder by_decoder({{"tokenizer_config.json", both}});
  const std::vector<int32_t> hi = [&] {  // without the space before a text
    std::vector<int32_t> tokens;
    bare->append_more("hi", tokens);
    return tokens;
  }();
  for (const SideFolder* folder : {&by_names, &by_decoder}) {
    const auto tokenizer = folder->open();
    EXPECT_EQ(tokenizer->vocab(), first + 2);
    std::vector<int32_t> expected{first};
    expected.insert(expected.end(), hi.begin(), hi.end());
    expected.push_back(first + 1);
    EXPECT_EQ(tokens_of(*tokenizer, "<|im_start|>hi<|im_end|>"), expected);
    EXPECT_EQ(tokenizer->decode(expected, false), "<|im_start|>hi<|im_end|>");
    EXPECT_EQ(tokenizer->decode(expected, true), "hi");
    EXPECT_EQ(tokens_of(*tokenizer, "<s>"), std::vector{tokenizer->find("<s>")});
    EXPECT_EQ(tokens_of(*tokenizer, "a word"), tokens_of(*bare, "a word"));
    EXPECT_EQ(tokenizer->special_tokens().at("eos_token"), "<|im_end|>");
    EXPECT_NE(tokenizer->name(), bare->name());
  }
  EXPECT_EQ(tokens_of(*by_decoder.open(), "<|im_end|>  hi"),
            tokens_of(*by_decoder.open(), "<|im_end|>hi"));
  EXPECT_NE(tokens_of(*by_names.open(), "<|im_end|>  hi"),
            tokens_of(*by_names.open(), "<|im_end|>hi"));
}

TEST(SideFiles, TokensBeyondTheEmbeddingAreRefusedInTexts) {
  const auto bare = open_tokenizer(data("small.model"));
  const SideFolder folder({{"added_tokens.json", {{"[PAD]", bare->vocab()}}}});
  const auto limited = open_tokenizer(folder.path(), bare->vocab());
  EXPECT_TRUE(limited->only_added_beyond());
  EXPECT_EQ(limited->num_beyond(), 1);
  EXPECT_EQ(limited->vocab(), bare->vocab());
  EXPECT_EQ(tokens_of(*limited, "a word"), tokens_of(*bare, "a word"));
  try {
    tokens_of(*limited, "a [PAD]");
    ADD_FAILURE() << "expected a refusal";
  } catch (const InvalidArgument& error) {
    EXPECT_THAT(error.what(), HasSubstr("'[PAD]': expected tokens from 0 to "));
  }
  EXPECT_FALSE(open_tokenizer(folder.path(), bare->vocab() - 100)->only_added_beyond());
}

TEST(SideFiles, NamesWhatIsWrong) {
  const std::pair<json, const char*> wrong[] = {
      {{{"added_tokens_decoder", {{"x", {{"content", "a"}}}}}}, "x = {"},
      {{{"added_tokens_decoder", {{"5", 7}}}}, "5 = 7: expected an object with a content"},
      {{{"added_tokens_decoder", {{"5", {{"content", "<q>"}, {"lstrip", 3}}}}}}, "lstrip = 3"},
      {{{"added_tokens_decoder", {{"99999999", {{"content", "<q>"}}}}}}, "number 99999999"},
      {{{"add_bos_token", "x"}}, "add_bos_token = \"x\": expected true or false"},
      {json::array(), "expected a JSON object"}};
  for (const auto& [config, message] : wrong) {
    const SideFolder folder({{"tokenizer_config.json", config}});
    expect_refused(folder.path(), message);
  }
}

TEST(SideFiles, TemplatesHaveAllForms) {
  const auto read = [](const std::vector<std::pair<std::string, json>>& files) {
    std::string found;
    for (const auto& [name, each] : read_side_files(SideFolder(files).path()).templates) {
      found += name + "=" + each.text + " ";
    }
    return found;
  };
  const json list = json::array({{{"name", "default"}, {"template", "D"}},
                                 {{"name", "tool_use"}, {"template", "T"}},
                                 {{"name", "odd"}}});
  EXPECT_EQ(read({}), "");
  EXPECT_EQ(read({{"tokenizer_config.json", {{"chat_template", "A"}}}}), "default=A ");
  EXPECT_EQ(read({{"tokenizer_config.json", {{"chat_template", list}}}}), "default=D tool_use=T ");
  EXPECT_EQ(read({{"chat_template.json", {{"chat_template", "J"}}}}), "default=J ");
  EXPECT_EQ(read({{"chat_template.json", {{"chat_template", {{"tool_use", "U"}}}}}}),
            "tool_use=U ");
  const TempDir dir;
  write_bytes(dir / "tokenizer_config.json", json{{"chat_template", list}}.dump());
  write_bytes(dir / "chat_template.jinja", "F");
  std::filesystem::create_directory(dir / "additional_chat_templates");
  write_bytes(dir / "additional_chat_templates/rag.jinja", "R");
  const SideFiles side = read_side_files(dir.path());
  ASSERT_EQ(side.templates.size(), 2u);
  EXPECT_EQ(side.templates.at("default").text, "F");
  EXPECT_EQ(side.templates.at("rag").text, "R");
  const TempDir copy;
  copy_side_files(dir.path(), copy.path());
  EXPECT_EQ(read_side_files(copy.path()).templates.at("rag").text, "R");
}

TEST(TokenizerFiles, DamagedFileIsRefusedOrWorks) {
  expect_safe(40, 40);
}

TEST(TokenizerFilesLong, DamagedFileIsRefusedOrWorks) {
  expect_safe(2000, 2000);
}

}  // namespace
}  // namespace tandem
