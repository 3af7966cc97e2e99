#include "engine/data/tokens/tokenized_text.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "engine/tokenizer/open.h"
#include "tandem/error.h"
#include "tandem/random.h"
#include "tests/engine/data/open_configured.h"
#include "tests/engine/train/temp_dir.h"

namespace tandem {
namespace {

using ::testing::HasSubstr;
using Paths = std::vector<std::string>;

const std::string kVocabularies = std::string(TANDEM_SOURCE_DIR) + "/tests/engine/tokenizer/data/";
const std::string kTokenizer = kVocabularies + "small_bytes.json";

/// Lines of words, some blank or indented, and runs without a line.
std::string make_text(uint64_t seed, size_t bytes) {
  std::string text;
  for (uint64_t i = 0; text.size() < bytes; ++i) {
    const auto random = philox(seed, 0, i);
    text += "word \u4e2d" + std::to_string(random[0] % 1000);
    if (random[1] % 9 == 0) text += "\n";
    if (random[1] % 31 == 0) text += "\n  ";
    if (random[2] % 4000 == 0) text += std::string(100'000, 'x');
  }
  return text;
}

TEST(TextBlock, EndsAfterALineThatNoWhiteSpaceFollows) {
  const std::string head(9000, 'x');
  EXPECT_EQ(text_block(head + "\n\n  \nnext", false), head.size() + 5);
  EXPECT_EQ(text_block(head + "\n", true), head.size() + 1);
  EXPECT_EQ(text_block("short\ntext", true), 10u);
}

TEST(TextBlock, EndsAfterAWholeCharacterWithoutALine) {
  std::string text(65535, 'x');
  text += "\u4e2d\u4e2d";
  EXPECT_EQ(text_block(text, false), 65535u);
  EXPECT_EQ(text_block(std::string(65537, '\x80'), false), 65533u);  // of no character
}

TEST(TokenizedText, BlocksCoverTheText) {
  const std::string text = make_text(3, 600'000);
  size_t at = 0;
  for (int blocks = 0; at < text.size(); ++blocks) {
    const std::string_view rest = std::string_view(text).substr(at, 65537);
    const size_t size = text_block(rest, at + rest.size() == text.size());
    ASSERT_GT(size, 0u);
    ASSERT_LE(size, 65536u);
    at += size;
  }
  EXPECT_EQ(at, text.size());
}

TEST(TokenizedText, AnyRangeIsThatOfTheWholeStream) {
  const TempDir dir;
  write_bytes(dir / "a.txt", make_text(1, 200'000));
  write_bytes(dir / "b.txt", "a short one");
  write_bytes(dir / "empty.txt", "");
  const auto tokenizer = open_tokenizer(kTokenizer);
  const TokenizedText source(Paths{dir / "a.txt", dir / "b.txt", dir / "empty.txt"}, 0, tokenizer);
  std::vector<int32_t> all(size_t(source.tokens()));
  source.read(0, all);
  EXPECT_EQ(all[0], tokenizer->separator());
  EXPECT_EQ(std::ranges::count(all, tokenizer->separator()), 2);
  const std::span<const int64_t> begins = source.document_begins();
  ASSERT_EQ(begins.size(), 3u);
  EXPECT_EQ(begins[0], 0);
  EXPECT_EQ(all[size_t(begins[1])], tokenizer->separator());
  EXPECT_EQ(begins[2], source.tokens());
  EXPECT_EQ(source.start_token(), tokenizer->separator());
  EXPECT_EQ(tokenizer->decode(all, true), make_text(1, 200'000) + "a short one");
  std::vector<int32_t> short_one;
  tokenizer->append("a short one", short_one);
  EXPECT_TRUE(std::equal(short_one.rbegin(), short_one.rend(), all.rbegin()));
  for (uint64_t i = 0; i < 60; ++i) {
    const auto random = philox(5, 0, i);
    const auto begin = int64_t(random[0] % (all.size() + 1));
    std::vector<int32_t> found(1 + random[1] % 3000), expected(found.size(), -1);
    source.read(begin, found);
    const size_t inside = std::min(found.size(), all.size() - size_t(begin));
    std::copy_n(all.begin() + long(begin), inside, expected.begin());
    ASSERT_EQ(found, expected) << begin;
  }
}

TEST(TokenizedText, LinesAreTokenizedAsInTheWholeText) {
  // A line ends words of this vocabulary.
  const TempDir dir;
  std::string text;
  for (int i = 0; i < 3000; ++i) text += "Line " + std::to_string(i) + ", of some words\n";
  write_bytes(dir / "a.txt", text);
  for (const char* name : {"small_bytes.json", "small_fallback.json", "small.model"}) {
    const auto tokenizer = open_tokenizer(kVocabularies + name);
    const TokenizedText source(Paths{dir / "a.txt"}, 0, tokenizer);
    std::vector<int32_t> found(size_t(source.tokens())), expected;
    source.read(0, found);
    tokenizer->append(text, expected);
    EXPECT_EQ(found, expected) << name;
  }
}

TEST(TokenizedText, FilesAreHeldOutByTheirContent) {
  const TempDir dir;
  Paths paths;
  for (int i = 0; i < 40; ++i) {
    paths.push_back(dir / std::to_string(i));
    write_bytes(paths.back(), "text " + std::to_string(i / 2));  // each twice
  }
  const auto tokenizer = open_tokenizer(kTokenizer);
  const TokenizedText source(paths, 0.4, tokenizer), all(paths, 0, tokenizer);
  ASSERT_TRUE(source.held_out().stream);
  EXPECT_EQ(source.tokens() + source.held_out().stream->tokens(), all.tokens());
  std::vector<int32_t> left_out(size_t(source.held_out().stream->tokens()));
  source.held_out().stream->read(0, left_out);
  EXPECT_EQ(std::ranges::count(left_out, tokenizer->separator()) % 2, 0);
  EXPECT_NE(source.fingerprint(), all.fingerprint());
}

TEST(TokenizedText, FileThatChangesIsNamed) {
  const TempDir dir;
  write_bytes(dir / "a.txt", "some text");
  const TokenizedText source(Paths{dir / "a.txt"}, 0, open_tokenizer(kTokenizer));
  write_bytes(dir / "a.txt", "other");
  std::vector<int32_t> tokens(4);
  EXPECT_THROW(source.read(0, tokens), IoError);
}

TEST(TokenizedText, FingerprintIsAlsoTheTokenizers) {
  const TempDir dir;
  write_bytes(dir / "a.txt", "some text");
  const auto with = [&](const std::string& name) {
    const auto tokenizer =
        open_tokenizer(std::string(TANDEM_SOURCE_DIR) + "/tests/engine/tokenizer/data/" + name);
    return TokenizedText(Paths{dir / "a.txt"}, 0, tokenizer).fingerprint();
  };
  EXPECT_NE(with("small_bytes.json"), with("small_fallback.json"));
}

TEST(OpenData, VocabularyMustHoldTheTokenizers) {
  const TempDir dir;
  write_bytes(dir / "a.txt", "some text");
  TrainConfig config;
  config.data.paths = {dir / "a.txt"};
  config.data.tokenizer = kTokenizer;
  config.model.vocab = 703;
  EXPECT_THAT(open_configured(config)->describe(), HasSubstr("1 file of text, "));
  config.model.vocab = 600;  // fewer than without the added tokens at the end
  try {
    open_configured(config);
    ADD_FAILURE() << "is opened";
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(),
                HasSubstr("model.vocab is 600: expected at least the 703 of data.tokenizer"));
  }
}

}  // namespace
}  // namespace tandem
