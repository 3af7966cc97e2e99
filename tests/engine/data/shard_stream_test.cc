// Streams of shards, compared with the sources that know all of their files.
#include "engine/data/stream/shard_stream.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>

#include "engine/data/corpus.h"
#include "engine/data/sampler.h"
#include "engine/data/text/documents.h"
#include "engine/data/text/json_lines.h"
#include "engine/data/tokens/token_files.h"
#include "engine/data/tokens/tokenized_text.h"
#include "engine/tokenizer/open.h"
#include "tandem/error.h"
#include "tandem/random.h"
#include "token_fixtures.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using Paths = std::vector<std::string>;
using Tokens = std::vector<int32_t>;

const std::string kTokenizer =
    std::string(TANDEM_SOURCE_DIR) + "/tests/engine/tokenizer/data/small_bytes.json";

std::string make_text(uint64_t seed, size_t bytes) {
  std::string text;
  for (uint64_t i = 0; text.size() < bytes; ++i) {
    const auto random = philox(seed, 0, i);
    text += "word " + std::to_string(random[0] % 1000) + (random[1] % 9 == 0 ? "\n" : " ");
  }
  return text;
}

Tokens all_of(const TokenSource& source) {
  Tokens tokens(size_t(source.tokens()));
  source.read(0, tokens);
  return tokens;
}

/// Shards of a format, and a source of a file of it that is not a stream.
struct Format {
  ShardFormat shards;
  std::string ending;
  std::function<std::string(uint64_t seed, size_t bytes)> make;
  std::function<std::unique_ptr<TokenSource>(const std::string& path)> open;
};

std::vector<Format> formats() {
  const auto bytes = std::make_shared<ByteTokenizer>();
  const std::shared_ptr<const Tokenizer> words = open_tokenizer(kTokenizer);
  const auto lines = [](uint64_t seed, size_t size) {
    std::string text = "\n";
    for (uint64_t i = 0; text.size() < size; ++i) {
      const size_t length = philox(seed, 1, i)[0] % 400;
      text += nlohmann::json{{"text", make_text(seed + i, i == 3 ? 90'000 : length)}}.dump() + "\n";
    }
    return text;
  };
  return {
      {{"text", 257, bytes},
       ".txt",
       make_text,
       [](const std::string& path) { return std::make_unique<Corpus>(Paths{path}, 0); }},
      {{"text", 257, words},
       ".txt",
       make_text,
       [=](const std::string& path) {
         return std::make_unique<TokenizedText>(Paths{path}, 0, words);
       }},
      {{"jsonl", 257, words},
       ".jsonl",
       lines,
       [=](const std::string& path) {
         return std::make_unique<JsonLines>(Paths{path}, 0, std::make_shared<TextLines>(words));
       }},
      {{"tokens", 300, nullptr},
       ".bin",
       [](uint64_t seed, size_t size) { return tokens_as(random_tokens(size / 2, 300, seed), 2); },
       [](const std::string& path) { return std::make_unique<TokenFiles>(Paths{path}, 0, 300); }},
  };
}

Paths write_shards(const TempDir& dir, const Format& format, int count) {
  Paths paths;
  for (int i = 0; i < count; ++i) {
    paths.push_back(dir / fmt::format("{:02}{}", i, format.ending));
    write_bytes(paths.back(),
                format.make(uint64_t(100 * i), 500 + philox(7, 7, uint64_t(i))[0] % 70'000));
  }
  return paths;
}

/// Tokens of `epochs` epochs, from the sources of single files, in the order of the seed.
Tokens expected_stream(const Format& format, const Paths& paths, uint64_t seed, int epochs) {
  Tokens tokens;
  for (int epoch = 0; epoch < epochs; ++epoch) {
    for (size_t i = 0; i < paths.size(); ++i) {
      const Tokens of_file = all_of(
          *format.open(paths[size_t(shard_at(seed, epoch, int64_t(paths.size()), int64_t(i)))]));
      tokens.insert(tokens.end(), of_file.begin(), of_file.end());
    }
  }
  return tokens;
}

TEST(ShardStream, EpochsAreTheTokensOfAllShardsInAnOrderOfTheirOwn) {
  for (const Format& format : formats()) {
    const TempDir dir;
    const Paths paths = write_shards(dir, format, 5);
    const Tokens expected = expected_stream(format, paths, 3, 3);
    const ShardStream stream(paths, format.shards, {.seed = 3});
    Tokens found(expected.size());
    stream.read(0, found);
    EXPECT_TRUE(found == expected) << format.shards.name;
    EXPECT_NE(expected_stream(format, paths, 4, 1), expected_stream(format, paths, 3, 1));
  }
}

TEST(ShardStream, AnyRangeFromAnyCursorIsThatOfTheWholeStream) {
  for (const Format& format : formats()) {
    const TempDir dir;
    const Paths paths = write_shards(dir, format, 4);
    const Tokens expected = expected_stream(format, paths, 3, 2);
    const StreamOptions options{.seed = 3, .retained_tokens = 5000};
    const ShardStream stream(paths, format.shards, options);
    for (uint64_t i = 0; i < 30; ++i) {
      const auto random = philox(5, 1, i);
      Tokens found(1 + random[0] % 40'000);
      const size_t begin = random[1] % (expected.size() - found.size());
      const ShardStream other(paths, format.shards, options);
      for (const ShardStream* each : {&stream, &other}) {
        if (each == &other) {
          const StreamCursor cursor = stream.reach(int64_t(begin));
          EXPECT_LE(cursor.position, int64_t(begin));
          each->seek(cursor);
          EXPECT_EQ(each->reach(int64_t(begin)), cursor);
        }
        each->read(int64_t(begin), found);
        ASSERT_TRUE(std::ranges::equal(found, std::span(expected).subspan(begin, found.size())))
            << format.shards.name << " " << begin;
      }
    }
  }
}

TEST(ShardStream, CursorsDoNotDependOnWhatWasReadBefore) {
  for (const Format& format : formats()) {
    const TempDir dir;
    const Paths paths = write_shards(dir, format, 4);
    const ShardStream stream(paths, format.shards, {.seed = 3, .retained_tokens = 1000});
    std::vector<StreamCursor> cursors;
    for (int64_t position = 0; position < 60'000; position += 7000) {
      cursors.push_back(stream.reach(position));
    }
    for (int64_t i : {8, 2, 5, 0, 7, 1}) {
      EXPECT_EQ(stream.reach(7000 * i), cursors[size_t(i)]) << format.shards.name;
      const ShardStream fresh(paths, format.shards, {.seed = 3});
      EXPECT_EQ(fresh.reach(7000 * i), cursors[size_t(i)]) << format.shards.name;
    }
  }
}

TEST(ShardStream, ReadsNoShardAgainWhileSamplesAreReadInOrder) {
  const Format format = formats()[1];
  const TempDir dir;
  const Paths paths = write_shards(dir, format, 6);
  constexpr int64_t kSeq = 32, kBlock = 16, kBatch = 24;
  const ShardStream stream(paths, format.shards,
                           {.seed = 3,
                            .shuffle_windows = kBlock,
                            .retained_tokens = retained_stream_tokens(kBlock * kSeq, kBatch * kSeq),
                            .ahead_tokens = 2 * kBlock * kSeq});
  const Sampler sampler(stream, kSeq, 9);
  Tokens tokens(kSeq), targets(kSeq);
  const auto end = int64_t(expected_stream(format, paths, 3, 1).size()) - (kBatch + kBlock) * kSeq;
  int64_t last = 0;
  for (int64_t first = 0; (first + kBatch) * kSeq < end; first += kBatch) {
    for (int64_t i = 0; i < kBatch; ++i) {  // of ranks in any order
      sampler.read(first + permute(1, uint64_t(first), kBatch, i), tokens, targets);
    }
    while (sampler.read_ahead()) {
    }
    // A shard that has ended is not missed, as long as its epoch lasts.
    last = sampler.cursors(first)[0].shard;
    for (int64_t shard = 0; shard < last; ++shard) {
      fs::remove(paths[size_t(shard_at(3, 0, 6, shard))]);
    }
  }
  EXPECT_GE(last, 4);
}

TEST(ShardStream, RestartReadsFromTheLastRecordedCursor) {
  const Format format = formats()[3];
  const TempDir dir;
  Paths paths;
  for (uint64_t i = 0; i < 80; ++i) {
    paths.push_back(dir / fmt::format("{:02}.bin", i));
    write_bytes(paths.back(), tokens_as(random_tokens(1000, 300, i), 2));
  }
  const Tokens expected = expected_stream(format, paths, 3, 3);
  const ShardStream stream(paths, format.shards, {.seed = 3, .retained_tokens = 16'000});
  Tokens found(1000);
  const auto check = [&](int64_t begin) {
    const int64_t before = stream.opened_shards();
    EXPECT_EQ(stream.reach(begin).position, begin / 1000 * 1000);
    stream.read(begin, found);
    EXPECT_TRUE(std::ranges::equal(found, std::span(expected).subspan(size_t(begin), 1000)));
    return stream.opened_shards() - before;
  };
  for (int64_t begin = 500; begin < 230'000; begin += 1000) EXPECT_LE(check(begin), 2) << begin;
  // Cursors are 2000 tokens apart, 62 of them at least: those up to the begin were dropped.
  for (int64_t begin = 229'500; begin > 110'000; begin -= 17'000) EXPECT_LE(check(begin), 4);
  EXPECT_GE(check(70'500), 60);
  for (int64_t begin = 500; begin < 120'000; begin += 1000) check(begin);
  EXPECT_LE(check(60'500), 4);
  // Tokens in memory are not dropped for a cursor that is a little ahead.
  check(80'500);
  const int64_t before = stream.opened_shards();
  for (int i = 0; i < 5; ++i) check(84'500), check(80'500);
  EXPECT_LE(stream.opened_shards() - before, 5);
}

TEST(ShardStream, BlocksOfWindowsArePermuted) {
  const Format format = formats()[3];
  const TempDir dir;
  const Paths paths = write_shards(dir, format, 4);
  const ShardStream stream(paths, format.shards, {.seed = 3, .shuffle_windows = 50});
  const Sampler sampler(stream, 16, 9), other(stream, 16, 10);
  std::set<int64_t> all;
  int moved = 0;
  for (int64_t sample = 0; sample < 500; ++sample) {
    const int64_t window = sampler.window(sample);
    EXPECT_EQ(window / 50, sample / 50);
    all.insert(window);
    moved += window != sample && window != other.window(sample);
    Tokens tokens(16), targets(16), expected(17);
    sampler.read(sample, tokens, targets);
    stream.read(16 * window, expected);
    EXPECT_TRUE(std::equal(tokens.begin(), tokens.end(), expected.begin()));
    EXPECT_TRUE(std::equal(targets.begin(), targets.end(), expected.begin() + 1));
    EXPECT_EQ(sampler.targets(sample), 16);
  }
  EXPECT_EQ(all.size(), 500u);
  EXPECT_GT(moved, 450);
}

TEST(ShardStream, DocumentsAreThoseOfTheSourceOfTheFile) {
  const TempDir dir;
  std::vector<int64_t> lengths;
  for (int64_t left = 30'000; left > 0; left -= lengths.back()) {
    lengths.push_back(std::min<int64_t>(left, 1 + philox(2, 2, lengths.size())[0] % 300));
  }
  write_megatron(dir / "a", random_tokens(30'000, 300), lengths);
  const Format lines = formats()[2];
  write_bytes(dir / "b.jsonl", lines.make(5, 60'000));
  const TokenFiles tokens(Paths{dir / "a.bin"}, 0, 300);
  const JsonLines documents(Paths{dir / "b.jsonl"}, 0,
                            std::make_shared<TextLines>(lines.shards.tokenizer));
  const ShardStream of_tokens(Paths{dir / "a.bin"}, {"tokens", 300, nullptr, true}, {});
  const ShardStream of_lines(Paths{dir / "b.jsonl"}, lines.shards, {});
  EXPECT_TRUE(of_tokens.has_documents());
  for (const auto& [stream, source] :
       {std::pair<const ShardStream*, const TokenSource*>{&of_tokens, &tokens},
        {&of_lines, &documents}}) {
    EXPECT_EQ(stream->start_token(), source->start_token());
    constexpr int64_t kSeq = 128;
    const Sampler sampler(*stream, kSeq, 1, {.document_mask = true});
    for (int64_t window = 0; (window + 1) * kSeq < source->tokens(); ++window) {
      Tokens found(kSeq), targets(kSeq), starts(kSeq), expected(kSeq), expected_starts(kSeq);
      sampler.read(window, found, targets, starts);
      source->read(window * kSeq + 1, expected);
      ignore_targets(*source, window * kSeq + 1, expected);
      find_document_starts(*source, window * kSeq, expected_starts);
      ASSERT_EQ(targets, expected) << window;
      ASSERT_EQ(starts, expected_starts) << window;
      ASSERT_EQ(sampler.targets(window), kSeq - std::ranges::count(targets, -1));
    }
  }
}

TEST(ShardStream, TokenFilesWithoutAnIndexHaveNoDocuments) {
  const TempDir dir;
  const Format format = formats()[3];
  const Paths paths = write_shards(dir, format, 2);
  EXPECT_FALSE(ShardStream(paths, format.shards, {}).has_documents());
}

std::string read_error(const ShardStream& stream, int64_t begin) {
  Tokens tokens(100);
  try {
    stream.read(begin, tokens);
  } catch (const IoError& error) {
    return error.what();
  }
  return "read";
}

TEST(ShardStream, ShardThatVanishesOrChangesIsNamedWhenItIsReached) {
  for (const Format& format : formats()) {
    const TempDir dir;
    const Paths paths = write_shards(dir, format, 3);
    const int64_t first = format.open(paths[size_t(shard_at(1, 0, 3, 0))])->tokens();
    const std::string next = paths[size_t(shard_at(1, 0, 3, 1))];
    const auto check = [&](const std::function<void()>& change, const std::string& what) {
      const ShardStream stream(paths, format.shards, {.seed = 1});
      change();
      EXPECT_EQ(read_error(stream, first - 100), "read");
      EXPECT_THAT(read_error(stream, first), HasSubstr(next + what));
      EXPECT_THAT(read_error(stream, first), HasSubstr(next)) << "again";
    };
    check([&] { fs::resize_file(next, 64); }, ": changed since the run began: holds 64 bytes");
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    check([&] { write_bytes(next, std::string(64, '\0')); }, ": was written to since");
    check([&] { fs::remove(next); }, ": ");
    EXPECT_THROW(ShardStream(paths, format.shards, {}), IoError);
  }
}

TEST(ShardStream, ShardThatChangesWhileItIsReadIsNamed) {
  const TempDir dir;
  const Format format = formats()[0];
  const Paths paths = write_shards(dir, format, 1);
  write_bytes(paths[0], make_text(1, 100'000));
  const ShardStream stream(paths, format.shards, {});
  EXPECT_EQ(read_error(stream, 0), "read");
  fs::resize_file(paths[0], 50'000);
  EXPECT_THAT(read_error(stream, 40'000), HasSubstr(paths[0] + ": changed while it is trained on"));
}

TEST(ShardStream, DamagedLineIsNamed) {
  const TempDir dir;
  write_bytes(dir / "a.jsonl", "{\"text\": \"one\"}\n{\"txt\": 1}\n");
  const ShardStream stream(Paths{dir / "a.jsonl"}, formats()[2].shards, {});
  EXPECT_THAT(read_error(stream, 0), HasSubstr(dir / "a.jsonl: the line at byte 16: "));
}

TEST(ShardStream, ShardsWithoutTokensAreRefused) {
  const TempDir dir;
  write_bytes(dir / "a.jsonl", "\n");
  write_bytes(dir / "b.jsonl", "");
  const ShardStream blank(Paths{dir / "a.jsonl", dir / "b.jsonl"}, formats()[2].shards, {});
  EXPECT_EQ(blank.shards(), 1);
  EXPECT_THAT(blank.notes(), ::testing::ElementsAre("left out " + dir / "b.jsonl, which is empty"));
  EXPECT_THAT(read_error(blank, 0), HasSubstr("1 shards hold no token"));
  EXPECT_THROW(ShardStream(Paths{dir / "b.jsonl"}, formats()[2].shards, {}), ConfigError);
}

TEST(ShardStream, FingerprintFollowsSizesFormatAndOrder) {
  const TempDir dir;
  const Format format = formats()[0];
  const Paths paths = write_shards(dir, format, 3);
  const auto hash = [&](const ShardFormat& shards, int64_t block) {
    return ShardStream(paths, shards, {.shuffle_windows = block}).fingerprint();
  };
  const std::string before = hash(format.shards, 8);
  EXPECT_EQ(hash(format.shards, 8), before);
  EXPECT_NE(hash(format.shards, 9), before);
  EXPECT_NE(hash(formats()[1].shards, 8), before);
  fs::resize_file(paths[2], 400);
  EXPECT_NE(hash(format.shards, 8), before);
}

TEST(ShardStream, CursorOfOtherDataIsRefused) {
  const TempDir dir;
  const Format format = formats()[0];
  const ShardStream stream(write_shards(dir, format, 3), format.shards, {});
  EXPECT_THROW(stream.seek({0, 3, 0, 10}), IoError);
}

}  // namespace
}  // namespace tandem
