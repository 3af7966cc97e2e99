#include "engine/data/text/json_lines.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "engine/data/corpus.h"
#include "tandem/error.h"
#include "tandem/random.h"
#include "tests/engine/data/open_configured.h"
#include "tests/engine/train/temp_dir.h"

namespace tandem {
namespace {

using ::testing::HasSubstr;
using Paths = std::vector<std::string>;

JsonLines make_source(const Paths& paths, double val_fraction = 0) {
  return {paths, val_fraction, std::make_shared<TextLines>(std::make_shared<ByteTokenizer>())};
}

std::vector<int32_t> stream_of_bytes(const std::vector<std::string>& documents) {
  std::vector<int32_t> tokens;
  for (const std::string& document : documents) ByteTokenizer().append(document, tokens);
  return tokens;
}

std::vector<int32_t> read_all(const TokenSource& source) {
  std::vector<int32_t> tokens(static_cast<size_t>(source.tokens()));
  source.read(0, tokens);
  return tokens;
}

TEST(JsonLines, EveryDocumentFollowsABeginToken) {
  const TempDir dir;
  write_bytes(
      dir / "a.jsonl",
      "{\"text\": \"one\"}\n\n  \n{\"id\": 7, \"text\": \"t\\u00e4\\n\", \"x\": {\"text\": 1}}\r\n"
      "{\"text\": \"\"}\n{\"text\": \"no newline at the end\"}");
  write_bytes(dir / "b.jsonl", "{\"text\": \"second file\"}\n");
  const JsonLines source = make_source({dir / "a.jsonl", dir / "b.jsonl"});
  const auto expected =
      stream_of_bytes({"one", "t\xc3\xa4\n", "", "no newline at the end", "second file"});
  EXPECT_EQ(read_all(source), expected);
  for (size_t begin = 0; begin < expected.size(); ++begin) {
    std::vector<int32_t> found(5), wanted(expected.begin() + long(begin), expected.end());
    wanted.resize(5, -1);
    source.read(int64_t(begin), found);
    ASSERT_EQ(found, wanted) << begin;
  }
}

TEST(JsonLines, HasTheTokensOfFilesOfTheSameTexts) {
  const TempDir dir;
  std::filesystem::create_directories(dir / "files");
  std::string lines;
  for (uint64_t i = 0; i < 120; ++i) {
    std::string text;
    for (uint64_t j = 0; j < 1 + philox(1, 0, i)[0] % 60; ++j) {
      text += char('a' + philox(1, 1 + i, j)[0] % 26);
    }
    write_bytes(dir / fmt::format("files/{:03}.txt", i), text);
    lines += "{\"text\": \"" + text + "\"}\n";
  }
  write_bytes(dir / "all.jsonl", lines);
  const Corpus corpus(Paths{dir / "files"}, 0.3);
  const JsonLines source = make_source({dir / "all.jsonl"}, 0.3);
  EXPECT_EQ(read_all(source), read_all(corpus));
  ASSERT_TRUE(source.held_out().stream);
  const Corpus held_out(corpus.held_out().files, 0);
  EXPECT_EQ(read_all(*source.held_out().stream), read_all(held_out));
}

TEST(JsonLines, LinesThatAreNoDocumentsAreNamed) {
  const TempDir dir;
  const auto refusal = [&](const std::string& text) -> std::string {
    write_bytes(dir / "x.jsonl", text);
    try {
      make_source({dir / "x.jsonl"});
    } catch (const Error& error) {
      return error.what();
    }
    return "accepted";
  };
  const std::string good = "{\"text\": \"good\"}\n";
  EXPECT_EQ(refusal(good), "accepted");
  for (const char* line : {"{\"text\": \"x", "{\"txet\": \"x\"}", "{\"text\": 3}", "[1]",
                           "\"text\"", "{\"text\": \"\xff\"}", "{} {}", "\xff"}) {
    const std::string message = refusal(good + line + "\n" + good);
    EXPECT_THAT(message, HasSubstr(dir / "x.jsonl:2: ")) << line;
    EXPECT_THAT(message, HasSubstr("expected {\"text\": \"...\"}")) << line;
    EXPECT_EQ(message.find('\n'), std::string::npos) << line;
  }
  EXPECT_THAT(refusal(""), HasSubstr("0 left to train on"));
  for (size_t size = 1; size < good.size() - 1; ++size) {
    EXPECT_THAT(refusal(good + good.substr(0, size)), HasSubstr("x.jsonl:2: ")) << size;
  }
}

TEST(JsonLines, ChangedFileIsNamedWhenRead) {
  const TempDir dir;
  write_bytes(dir / "x.jsonl", "{\"text\": \"before\"}\n{\"text\": \"second\"}\n");
  const JsonLines source = make_source({dir / "x.jsonl"});
  write_bytes(dir / "x.jsonl", "{\"text\": \"before\"}\n{\"text\": \"other!\"}\n");
  std::vector<int32_t> tokens(4);
  try {
    source.read(0, tokens);
    ADD_FAILURE() << "accepted";
  } catch (const IoError& error) {
    EXPECT_THAT(error.what(), HasSubstr(dir / "x.jsonl: changed while it is trained on"));
  }
}

TEST(JsonLines, IsChosenByName) {
  const TempDir dir;
  write_bytes(dir / "x.jsonl", "{\"text\": \"before\"}\n");
  TrainConfig config;
  config.data.paths = {dir.path()};
  EXPECT_EQ(open_configured(config)->describe(), "1 file of JSON Lines, 1 documents, 7 tokens");
  config.data.format = "text";
  EXPECT_EQ(open_configured(config)->describe(), "1 files, 19 bytes of text, 0 files held out");
}

}  // namespace
}  // namespace tandem
