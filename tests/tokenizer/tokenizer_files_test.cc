// Files that are not understood, damaged or lie.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "core/files.h"
#include "engine/tokenizer/open.h"
#include "tandem/error.h"
#include "tests/train/temp_dir.h"

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
      {"truncation is {",
       [](json& j) {
         j["truncation"] = {{"max_length", 1}};
       }},
      {"padding is {",
       [](json& j) {
         j["padding"] = {{"strategy", "x"}};
       }},
      {"normalizer.type is \"NFKC\": expected NFC",
       [](json& j) {
         j["normalizer"] = {{"type", "NFKC"}};
       }},
      {"normalizer.type is null", [](json& j) { j["normalizer"] = json::object(); }},
      {"model.dropout is 0.1: expected null", [](json& j) { j["model"]["dropout"] = 0.1; }},
      {"model.end_of_word_suffix is \"</w>\"",
       [](json& j) { j["model"]["end_of_word_suffix"] = "</w>"; }},
      {"pre_tokenizer.type is \"Whitespace\"",
       [](json& j) {
         j["pre_tokenizer"] = {{"type", "Whitespace"}};
       }},
      {"pre_tokenizer.pretokenizers[0].behavior is \"Contiguous\": expected Isolated or Removed",
       [](json& j) { j["pre_tokenizer"]["pretokenizers"][0]["behavior"] = "Contiguous"; }},
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
      {"added_tokens[0].single_word is true: expected false",
       [](json& j) { j["added_tokens"][0]["single_word"] = true; }},
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
                 "expected a tokenizer.json, tekken.json, tokenizer.model or .tiktoken");
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

TEST(TokenizerFiles, DamagedFileIsRefusedOrWorks) {
  expect_safe(40, 40);
}

TEST(TokenizerFilesLong, DamagedFileIsRefusedOrWorks) {
  expect_safe(2000, 2000);
}

}  // namespace
}  // namespace tandem
