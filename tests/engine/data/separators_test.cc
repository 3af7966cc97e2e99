// Documents by a separator inside of a file of tokens or text.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <utility>

#include "engine/config/config.h"
#include "engine/data/corpus.h"
#include "engine/data/sampler.h"
#include "engine/data/stream/shard_stream.h"
#include "engine/data/text/documents.h"
#include "engine/data/text/packing.h"
#include "engine/data/tokens/token_files.h"
#include "engine/data/tokens/tokenized_text.h"
#include "engine/tokenizer/open.h"
#include "tandem/error.h"
#include "tests/engine/data/open_configured.h"
#include "token_fixtures.h"

namespace tandem {
namespace {

using ::testing::HasSubstr;
using Paths = std::vector<std::string>;
using Tokens = std::vector<int32_t>;

constexpr int32_t kSeparator = 299;
constexpr int64_t kVocab = 300;

/// Position of separators, as programs write them.
enum class Written : uint8_t { before, after, between };

/// Files of documents, and what a source should know of them.
struct Separated {
  Paths paths;
  Tokens tokens;
  std::vector<int64_t> begins, unpredicted;
};

Separated write_separated(const TempDir& dir, Written written, int files) {
  Separated all;
  for (int file = 0; file < files; ++file) {
    Tokens tokens;
    const auto add = [&](bool separator, int64_t begin) {
      if (separator) tokens.push_back(kSeparator);
      if (begin >= 0) all.begins.push_back(begin);
    };
    const auto position = [&] { return int64_t(all.tokens.size() + tokens.size()); };
    const int documents = 3 + file * 20;
    for (int i = 0; i < documents; ++i) {
      const uint64_t number = uint64_t(file * 1000 + i);
      if (written == Written::before) add(true, position());
      if (written == Written::between) {
        if (i == 0) all.unpredicted.push_back(position());
        add(i > 0, position());
      }
      if (written == Written::after && file + i == 0) {
        all.unpredicted.push_back(0);
        add(false, 0);
      }
      const Tokens text = random_tokens(1 + philox(4, 4, number)[0] % 70, 299, number);
      tokens.insert(tokens.end(), text.begin(), text.end());
      const bool is_last = file + 1 == files && i + 1 == documents;
      if (written == Written::after) add(true, is_last ? -1 : position());
    }
    all.paths.push_back(dir / fmt::format("{}-{}.bin", int(written), file));
    write_bytes(all.paths.back(), tokens_as(tokens, 2));
    all.tokens.insert(all.tokens.end(), tokens.begin(), tokens.end());
  }
  all.begins.push_back(int64_t(all.tokens.size()) - (written == Written::after ? 1 : 0));
  return all;
}

constexpr Written kAll[] = {Written::before, Written::after, Written::between};

TEST(Separators, DocumentsOfTokenFilesBeginWithThemOrWithAFile) {
  for (const Written written : kAll) {
    const TempDir dir;
    const Separated all = write_separated(dir, written, 3);
    const TokenFiles source(all.paths, 0, kVocab, nullptr, {}, kSeparator);
    EXPECT_TRUE(std::ranges::equal(source.document_begins(), all.begins)) << int(written);
    EXPECT_TRUE(std::ranges::equal(source.unpredicted_begins(), all.unpredicted)) << int(written);
    EXPECT_EQ(source.start_token(), kSeparator);
    Tokens targets(all.tokens.size()), expected = all.tokens;
    source.read(0, targets);
    ignore_targets(source, 0, targets);
    for (const int64_t position : all.unpredicted) expected[size_t(position)] = -1;
    EXPECT_EQ(targets, expected);
    EXPECT_EQ(count_ignored_targets(source, 1, source.tokens()),
              int64_t(all.unpredicted.size()) - (written == Written::before ? 0 : 1));
  }
}

TEST(Separators, PackedDocumentsPredictTheOneAfterThem) {
  for (const Written written : kAll) {
    const TempDir dir;
    const Separated all = write_separated(dir, written, 2);
    const TokenFiles source(all.paths, 0, kVocab, nullptr, {}, kSeparator);
    const Packing packing(source, 64);
    int64_t closing = 0;
    for (int64_t i = 0; i < packing.sequences(); ++i) {
      Tokens tokens(64), targets(64), starts(64);
      packing.read(i, tokens, targets, starts);
      closing += std::ranges::count(targets, kSeparator);
    }
    EXPECT_EQ(closing, int64_t(all.begins.size()) - 1);
    EXPECT_EQ(packing.predictions(), all.begins.back());
  }
}

TEST(Separators, HeldOutTokensAreWholeDocuments) {
  for (const Written written : kAll) {
    const TempDir dir;
    const Separated all = write_separated(dir, written, 1);
    const auto split = [&](double fraction) {
      const TokenFiles source(all.paths, fraction, kVocab, nullptr, {}, kSeparator);
      Tokens tokens(size_t(source.tokens()));
      source.read(0, tokens);
      const TokenSource* const stream = source.held_out().stream.get();
      if (!stream) return std::pair{tokens, Tokens{}};
      Tokens held_out(size_t(stream->tokens()));
      stream->read(0, held_out);
      return std::pair{tokens, held_out};
    };
    for (const double fraction : {0.2, 0.5, 0.8}) {
      const auto [training, held_out] = split(fraction);
      Tokens joined = training;
      joined.insert(joined.end(), held_out.begin(), held_out.end());
      EXPECT_EQ(joined, all.tokens);
      if (held_out.empty()) continue;
      EXPECT_EQ((written == Written::before ? held_out.front() : training.back()), kSeparator);
      EXPECT_LE(held_out.size(), size_t(fraction * double(all.tokens.size())) + 1);
    }
    EXPECT_FALSE(split(0.5).second.empty());
  }
  const TempDir dir;
  write_bytes(dir / "one.bin", tokens_as(random_tokens(1000, 299), 2));  // without a separator
  const TokenFiles source(Paths{dir / "one.bin"}, 0.2, kVocab, nullptr, {}, kSeparator);
  EXPECT_EQ(source.tokens(), 1000);
  EXPECT_TRUE(source.held_out().empty());
}

/// Targets and documents of the windows of a stream, as its source tells them.
void expect_windows(const ShardStream& stream, const TokenSource& source, int64_t seq) {
  const Sampler sampler(stream, seq, 1, {.document_mask = true});
  for (int64_t window = 0; (window + 1) * seq < source.tokens(); ++window) {
    Tokens tokens(static_cast<size_t>(seq)), targets(tokens.size()), starts(tokens.size());
    Tokens expected(tokens.size()), expected_targets(tokens.size()), expected_starts(tokens.size());
    sampler.read(window, tokens, targets, starts);
    source.read(window * seq, expected);
    source.read(window * seq + 1, expected_targets);
    ignore_targets(source, window * seq + 1, expected_targets);
    find_document_starts(source, window * seq, expected_starts);
    ASSERT_EQ(tokens, expected) << window;
    ASSERT_EQ(targets, expected_targets) << window;
    ASSERT_EQ(starts, expected_starts) << window;
    ASSERT_EQ(sampler.targets(window), seq - std::ranges::count(targets, -1));
  }
}

TEST(Separators, StreamsOfTokenFilesHaveTheSameDocuments) {
  for (const Written written : kAll) {
    const TempDir dir;
    const Separated all = write_separated(dir, written, 3);
    Paths in_order;
    for (int64_t i = 0; i < 3; ++i) in_order.push_back(all.paths[size_t(shard_at(5, 0, 3, i))]);
    const TokenFiles source(in_order, 0, kVocab, nullptr, {}, kSeparator);
    ShardFormat format{"tokens", kVocab, nullptr, true};
    format.separator_token = kSeparator;
    const ShardStream stream(all.paths, format, {.seed = 5, .retained_tokens = 10'000});
    EXPECT_TRUE(stream.has_documents());
    expect_windows(stream, source, 16);
  }
}

const std::string kMark = "<|endoftext|>";

/// Documents of which some end near a block's largest size.
std::vector<std::string> make_documents() {
  std::vector<std::string> documents;
  for (uint64_t i = 0; i < 40; ++i) {
    documents.emplace_back(1 + philox(6, 6, i)[0] % 3000, char('a' + i % 26));
    for (size_t at = 50; at < documents.back().size(); at += 90) documents.back()[at] = '\n';
  }
  for (size_t size = kTextWindow - 15; size < kTextWindow + 3; ++size) {
    documents.emplace_back(size, 'x');
  }
  documents.emplace_back("\n <|endof a line");
  return documents;
}

class SeparatedText : public ::testing::Test {
 protected:
  SeparatedText() {
    std::string joined = kMark;  // empty documents are left out
    const auto documents = make_documents();
    std::filesystem::create_directory(dir_ / "files");
    for (size_t i = 0; i < documents.size(); ++i) {
      files_.push_back(dir_ / fmt::format("files/{:03}", i));
      write_bytes(files_.back(), documents[i]);
      joined += documents[i] + kMark + (i % 7 == 0 ? kMark : "");
    }
    write_bytes(dir_ / "joined.txt", joined);
  }
  const TempDir dir_;
  Paths files_;
  const std::shared_ptr<const Tokenizer> tokenizers_[2]{
      std::make_shared<ByteTokenizer>(),
      open_tokenizer(std::string(TANDEM_SOURCE_DIR) +
                     "/tests/engine/tokenizer/data/small_bytes.json")};
};

TEST_F(SeparatedText, HasTheTokensOfAFileForEachDocument) {
  for (const auto& tokenizer : tokenizers_) {
    const TokenizedText expected(files_, 0, tokenizer);
    const TokenizedText found(Paths{dir_ / "joined.txt"}, 0, tokenizer, nullptr, kMark);
    ASSERT_EQ(found.tokens(), expected.tokens());
    Tokens tokens(size_t(found.tokens())), expected_tokens(tokens.size());
    found.read(0, tokens);
    expected.read(0, expected_tokens);
    EXPECT_TRUE(tokens == expected_tokens);
    EXPECT_TRUE(std::ranges::equal(found.document_begins(), expected.document_begins()));
    const TokenizedText split(Paths{dir_ / "joined.txt"}, 0.4, tokenizer, nullptr, kMark);
    const TokenizedText expected_split(files_, 0.4, tokenizer);
    EXPECT_EQ(split.fingerprint(), expected_split.fingerprint());
    EXPECT_EQ(split.held_out().identity, expected_split.held_out().identity);
  }
}

TEST_F(SeparatedText, HasTheSameTokensInAStream) {
  for (const auto& tokenizer : tokenizers_) {
    const TokenizedText source(Paths{dir_ / "joined.txt"}, 0, tokenizer, nullptr, kMark);
    ShardFormat format{"text", 257, tokenizer};
    format.separator = kMark;
    const ShardStream stream(Paths{dir_ / "joined.txt"}, format, {.retained_tokens = 2'000'000});
    Tokens tokens(size_t(source.tokens())), expected(tokens.size());
    std::vector<int64_t> begins;
    stream.read(0, tokens, begins);
    source.read(0, expected);
    EXPECT_TRUE(tokens == expected);
    EXPECT_TRUE(std::ranges::equal(begins, source.document_begins().first(begins.size())));
    EXPECT_EQ(begins.size() + 1, source.document_begins().size());
  }
}

TEST(Separators, OfAnotherKindThanTheFilesAreRefused) {
  const TempDir dir;
  write_bytes(dir / "a.jsonl", "{\"text\": \"one\"}\n");
  write_bytes(dir / "a.bin", tokens_as(random_tokens(100, 257), 2));
  const auto refusal = [&](const std::string& name, const std::string& separator) {
    TrainConfig config;
    config.model.vocab = 257;
    config.data.paths = {dir / name};
    config.data.document_separator = separator;
    try {
      open_configured(config);
    } catch (const ConfigError& error) {
      return std::string(error.what());
    }
    return std::string("opened");
  };
  EXPECT_EQ(refusal("a.bin", "256"), "opened");
  EXPECT_THAT(refusal("a.bin", "257"), HasSubstr("\"257\": expected a token of token files, 0 to"));
  EXPECT_THAT(refusal("a.bin", "<|end|>"), HasSubstr("expected a token of token files, 0 to 256"));
  EXPECT_THAT(refusal("a.jsonl", "x"), HasSubstr("expected none for JSON Lines"));
}

}  // namespace
}  // namespace tandem
