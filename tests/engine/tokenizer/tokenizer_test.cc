// Small tokenizers of each kind of file against what tokenizers, sentencepiece and tiktoken made of
// them (make_data.py), and properties that hold for all.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/system/files.h"
#include "engine/tokenizer/open.h"
#include "engine/tokenizer/text_decoder.h"
#include "tandem/error.h"
#include "tests/engine/train/temp_dir.h"

namespace tandem {
namespace {

using nlohmann::json;
using testing::ElementsAre;
using testing::HasSubstr;

std::string data(const std::string& name) {
  return std::string(TANDEM_TEST_DATA) + "/" + name;
}

const json& expected() {
  static const json read = json::parse(read_file(data("expected.json")));
  return read;
}

std::vector<std::string> files() {
  std::vector<std::string> names;
  for (const auto& [name, cases] : expected().items()) names.push_back(name);
  return names;
}

std::vector<int32_t> encode(const TextTokenizer& tokenizer, std::string_view text,
                            bool adds = false) {
  std::vector<int32_t> tokens;
  tokenizer.encode(text, adds, tokens);
  return tokens;
}

class TokenizerFile : public testing::TestWithParam<std::string> {};

TEST_P(TokenizerFile, TokensEqualTheOracles) {
  const auto tokenizer = open_tokenizer(data(GetParam()));
  ASSERT_GT(expected()[GetParam()].size(), 50u);
  for (const json& example : expected()[GetParam()]) {
    const auto text = example[0].get<std::string>();
    EXPECT_EQ(encode(*tokenizer, text), example[1].get<std::vector<int32_t>>()) << example[0];
  }
}

TEST_P(TokenizerFile, TokensHaveAtMostTheirBytes) {
  const auto tokenizer = open_tokenizer(data(GetParam()));
  const auto max = size_t(tokenizer->max_bytes_per_token());
  if (max == 0) return;
  std::vector<std::string> texts;
  for (const json& example : expected()[GetParam()]) texts.push_back(example[0]);
  for (const std::string unit : {" ", "\n", "\t ", "a", "0", "the ", "\u2581", "\u03b9\u0308\u0301",
                                 "\u1100\u1161\u11a8", "\u65e5", "\U0001f600", "\xff", "\u0301"}) {
    texts.emplace_back();
    for (int i = 0; i < 500; ++i) texts.back() += unit;
  }
  for (const std::string& text : texts) {
    EXPECT_LE(text.size(), max * encode(*tokenizer, text).size()) << text.substr(0, 50);
  }
}

TEST(Tokenizer, TokensThatTakeWhiteSpaceHaveNoMaxBytes) {
  EXPECT_EQ(open_tokenizer(data("small_bytes.json"))->max_bytes_per_token(), 0);
  EXPECT_GT(open_tokenizer(data("small_fallback.json"))->max_bytes_per_token(), 0);
  EXPECT_GT(open_tokenizer(data("cl100k_small.tiktoken"))->max_bytes_per_token(), 0);
}

TEST_P(TokenizerFile, ByteByByteDecodingEqualsDecodingAtOnce) {
  const auto tokenizer = open_tokenizer(data(GetParam()));
  for (const json& example : expected()[GetParam()]) {
    const std::vector<int32_t> tokens = encode(*tokenizer, example[0].get<std::string>());
    TextDecoder decoder(*tokenizer, false);
    std::string text;
    for (const int32_t token : tokens) text += decoder.add(token);
    text += decoder.rest();
    EXPECT_EQ(text, tokenizer->decode(tokens, false));
  }
}

/// Files that do not replace characters.
class TokenizerFileOfBytes : public TokenizerFile {};

TEST_P(TokenizerFileOfBytes, AnyBytesReturnFromTheirTokens) {
  const auto tokenizer = open_tokenizer(data(GetParam()));
  std::mt19937 random(1);
  for (int i = 0; i < 300; ++i) {
    std::string bytes;
    for (uint32_t n = random() % 40; n > 0; --n) bytes += char(random() % 3 ? random() : ' ');
    EXPECT_EQ(tokenizer->decode(encode(*tokenizer, bytes), false), bytes) << json(bytes.size());
  }
}

TEST_P(TokenizerFile, ThreadsHaveTheSameTokens) {
  const auto tokenizer = open_tokenizer(data(GetParam()));
  const json& examples = expected()[GetParam()];
  std::vector<int> failures(4, 0);
  std::vector<std::thread> threads;
  for (int& failed : failures) {
    threads.emplace_back([&] {
      for (const json& example : examples) {
        failed += encode(*tokenizer, example[0].get<std::string>()) !=
                  example[1].get<std::vector<int32_t>>();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_THAT(failures, ElementsAre(0, 0, 0, 0));
}

std::string test_name(const testing::TestParamInfo<std::string>& file) {
  std::string name = file.param;
  for (char& c : name) c = std::isalnum(uint8_t(c)) ? c : '_';
  return name;
}

INSTANTIATE_TEST_SUITE_P(Kinds, TokenizerFile, testing::ValuesIn(files()), test_name);
INSTANTIATE_TEST_SUITE_P(Kinds, TokenizerFileOfBytes,
                         testing::Values("small_bytes.json", "small_fallback.json", "small.model",
                                         "cl100k_small.tiktoken", "tekken_small.json"),
                         test_name);

TEST(Tokenizer, TemplateAddsItsTokens) {
  const auto level = open_tokenizer(data("small_bytes.json"));
  EXPECT_EQ(encode(*level, "", true), std::vector<int32_t>{level->separator()});
  EXPECT_EQ(level->decode(encode(*level, "x", true), false), "<|begin_of_text|>x");
  EXPECT_EQ(level->decode(encode(*level, "x", true), true), "x");
  const auto fallback = open_tokenizer(data("small_fallback.json"));
  EXPECT_EQ(fallback->separator(), 1);
  EXPECT_EQ(fallback->decode(encode(*fallback, " x", true), false), "<s>  x");
}

TEST(Tokenizer, DocumentBeginsWithTheSeparator) {
  const auto tokenizer = open_tokenizer(data("small.model"));
  std::vector<int32_t> tokens;
  tokenizer->append("a", tokens);
  tokenizer->append("", tokens);
  EXPECT_EQ(tokens.front(), tokenizer->separator());
  EXPECT_EQ(tokens.back(), tokenizer->separator());
  EXPECT_EQ(tokenizer->decode(tokens, true), "a");
}

TEST(Tokenizer, AddedTokenTakesTheSpaceAroundIt) {
  const auto tokenizer = open_tokenizer(data("small_bytes.json"));
  const int32_t tool = encode(*tokenizer, "<tool>").at(0);
  std::vector<int32_t> around = encode(*tokenizer, "a");
  around.push_back(tool);
  around.push_back(encode(*tokenizer, "b").at(0));
  EXPECT_EQ(encode(*tokenizer, "a \n\u00a0<tool>\t\u3000 b"), around);
}

TEST(Tokenizer, NameIsThatOfTheContent) {
  const auto tokenizer = open_tokenizer(data("small.model"));
  EXPECT_THAT(tokenizer->name(), testing::MatchesRegex("sentencepiece [0-9a-f]+"));
}

/// Writes the vocabulary of small_bytes.json as GPT-2's two files, with tokens beside it.
int32_t write_vocab_and_merges(const TempDir& dir, const json& config) {
  json vocab = json::parse(read_file(data("small_bytes.json")))["model"]["vocab"];
  std::string merges = "#version: 0.2\n";
  const json root = json::parse(read_file(data("small_bytes.json")));
  for (const json& merge : root["model"]["merges"]) {
    merges += merge[0].get<std::string>() + " " + merge[1].get<std::string>() + "\n";
  }
  const auto first = int32_t(vocab.size());
  vocab["<|endoftext|>"] = first;
  write_bytes(dir / "vocab.json", vocab.dump());
  write_bytes(dir / "merges.txt", merges);
  json tokens = config;
  const auto add = [&](int32_t id, const char* content, const char* flag) {
    json& token = tokens["added_tokens_decoder"][std::to_string(id)];
    token = {{"content", content}};
    token[flag] = true;
  };
  add(first + 1, "<|im_start|>", "special");
  add(first + 2, "<tool>", "lstrip");
  add(first + 3, "word", "single_word");
  write_bytes(dir / "tokenizer_config.json", tokens.dump());
  return first;
}

TEST(VocabAndMerges, WordsAreThoseOfTheTokenizersClass) {
  const TempDir dir;
  const std::string text = "I'LL pay 1234 <tool>word \u00e91 words\n\n  <|im_start|>word";
  struct Case {
    json config;
    std::vector<int32_t> digits;  // " 1234"
  };
  const std::vector<int32_t> together{220, 478, 18, 19}, one_by_one{220, 16, 17, 18, 19};
  for (const Case& each :
       {Case{{{"tokenizer_class", "GPT2Tokenizer"}}, together},
        Case{{{"tokenizer_class", "GPT2TokenizerFast"}, {"add_prefix_space", true}}, together},
        Case{{{"tokenizer_class", "GPTNeoXTokenizerFast"}}, together},
        Case{{{"tokenizer_class", "Qwen2Tokenizer"}}, one_by_one}}) {
    const int32_t first = write_vocab_and_merges(dir, each.config);
    // As transformers 5.24 encodes it.
    std::vector<int32_t> expected{40, 6, 43, 43, 283, 318};
    if (each.config.contains("add_prefix_space")) expected.insert(expected.begin(), 220);
    expected.insert(expected.end(), each.digits.begin(), each.digits.end());
    for (const int32_t token :
         {first + 2, first + 3, 347, 102, 16, 273, 277, 67, 82, 308, 304, first + 1, first + 3}) {
      expected.push_back(token);
    }
    const auto tokenizer = open_tokenizer(dir.path());
    std::vector<int32_t> tokens;
    tokenizer->encode(text, false, tokens);
    EXPECT_EQ(tokens, expected) << each.config;
    EXPECT_EQ(tokenizer->separator(), first);
    const TempDir copied;
    copy_tokenizer(dir.path(), copied.path());
    EXPECT_EQ(find_tokenizer(copied.path()), "tokenizer.json");
    tokens.clear();
    open_tokenizer(copied.path())->encode(text, false, tokens);
    EXPECT_EQ(tokens, expected) << each.config;
  }
}

TEST(VocabAndMerges, TokensAroundTextsFollowTheConfiguration) {
  const TempDir dir;
  const int32_t first =
      write_vocab_and_merges(dir, {{"tokenizer_class", "GPT2Tokenizer"}, {"add_bos_token", true}});
  std::vector<int32_t> tokens;
  open_tokenizer(dir / "vocab.json")->encode("a", true, tokens);
  EXPECT_EQ(tokens, (std::vector<int32_t>{first, 64}));
}

TEST(VocabAndMerges, ClassIsThatOfTheModelOrRefused) {
  const TempDir dir;
  write_vocab_and_merges(dir, json::object());
  write_bytes(dir / "config.json", R"({"model_type": "qwen3_moe"})");
  std::vector<int32_t> tokens;
  open_tokenizer(dir.path())->encode("12", false, tokens);
  EXPECT_EQ(tokens.size(), 2);
  const auto encode = [&] {
    tokens.clear();
    open_tokenizer(dir.path())->encode("e\u0301", false, tokens);
    return tokens;
  };
  write_bytes(dir / "config.json", R"({"model_type": "gpt_neox"})");
  const std::vector<int32_t> composed = encode();
  write_bytes(dir / "config.json", R"({"model_type": "gpt2"})");
  EXPECT_NE(encode(), composed);
  write_bytes(dir / "config.json", R"({"model_type": "roberta"})");
  const auto refusal = [&] {
    try {
      open_tokenizer(dir.path());
    } catch (const ConfigError& error) {
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  EXPECT_THAT(refusal(), HasSubstr("vocab.json: no tokenizer_class in tokenizer_config.json: "
                                   "expected GPT2Tokenizer"));
  write_vocab_and_merges(dir, {{"tokenizer_class", "RobertaTokenizer"}});
  EXPECT_THAT(refusal(), HasSubstr("tokenizer_class is RobertaTokenizer: expected GPT2Tokenizer, "
                                   "CodeGenTokenizer, GPTNeoXTokenizer or Qwen2Tokenizer, or a "
                                   "tokenizer.json, which python3 -c"));
}

TEST(Utf8Stream, HoldsBackAnIncompleteCharacter) {
  Utf8Stream stream;
  EXPECT_EQ(stream.add("a\xe2"), "a");
  EXPECT_EQ(stream.add("\x82"), "");
  EXPECT_EQ(stream.add("\xac\xf0\x9f"), "\u20ac");
  EXPECT_EQ(stream.rest(), "\ufffd");
  EXPECT_EQ(stream.rest(), "");
}

TEST(Utf8Stream, ReplacesEachMaximalPartOfACharacter) {
  // As in the Unicode standard, table 3-8 and following.
  const std::pair<std::string, int> cases[] = {
      {"\xc0\xaf", 2},         {"\xed\xa0\x80", 3},
      {"\xf4\x91\x92\x93", 4}, {"\xe1\x80\xe2\xf0\x91\x92\xf1\xbf", 4},
      {"\xf0\x80\x80", 3},     {"\xe0\x9f\xbf", 3}};
  for (const auto& [bytes, count] : cases) {
    std::string replaced;
    for (int i = 0; i < count; ++i) replaced += "\ufffd";
    for (size_t cut = 0; cut <= bytes.size(); ++cut) {
      Utf8Stream stream;
      std::string text = stream.add(bytes.substr(0, cut));
      text += stream.add(bytes.substr(cut) + "A");
      EXPECT_EQ(text, replaced + "A");
    }
  }
}

}  // namespace
}  // namespace tandem
