#include "engine/data/tokens/token_files.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <numeric>
#include <utility>

#include "core/system/files.h"
#include "engine/data/scored_windows.h"
#include "tandem/error.h"
#include "tests/engine/data/open_configured.h"
#include "tests/error_of.h"
#include "token_fixtures.h"

namespace tandem {
namespace {

using ::testing::HasSubstr;
using Paths = std::vector<std::string>;

constexpr int32_t kVocab = 257;

std::vector<int32_t> all_tokens(const TokenSource& source) {
  std::vector<int32_t> tokens(static_cast<size_t>(source.tokens()));
  source.read(0, tokens);
  return tokens;
}

std::string refusal_of(const std::string& path, int64_t vocab = kVocab) {
  return error_of([&] { TokenFiles(Paths{path}, 0, vocab); });
}

TEST(TokenFiles, ReadsEveryTypeOfEveryFormat) {
  const TempDir dir;
  struct Type {
    int megatron;
    const char* npy;
    int bytes;
    int32_t vocab;
  };
  constexpr Type kTypes[] = {{1, "|u1", 1, 256},    {2, "|i1", 1, 128},      {8, "<u2", 2, 65536},
                             {3, "<i2", 2, 32768},  {-1, "<u4", 4, 1000000}, {4, "<i4", 4, 1000000},
                             {5, "<i8", 8, 1000000}};
  for (const Type& type : kTypes) {
    const std::vector<int32_t> tokens = random_tokens(300, type.vocab, uint64_t(type.bytes));
    write_bytes(dir / "x.npy", npy_text(type.npy, tokens, type.bytes));
    EXPECT_EQ(all_tokens(TokenFiles(Paths{dir / "x.npy"}, 0, 1000000)), tokens) << type.npy;
    if (type.megatron < 0) continue;
    IndexFixture index{.type_code = type.megatron,
                       .item = type.bytes,
                       .lengths = {100, 0, 150, 50},
                       .documents = {0, 2}};
    write_bytes(dir / "x.bin", tokens_as(tokens, type.bytes));
    write_bytes(dir / "x.idx", index.text());
    EXPECT_EQ(all_tokens(TokenFiles(Paths{dir / "x.bin"}, 0, 1000000)), tokens) << type.megatron;
  }
  const std::vector<int32_t> tokens = random_tokens(77, 65536);
  write_bytes(dir / "nanogpt.bin", tokens_as(tokens, 2));
  EXPECT_EQ(all_tokens(TokenFiles(Paths{dir / "nanogpt.bin"}, 0, 65536)), tokens);
}

TEST(TokenFiles, FixturesAreWhatNumpyWrites) {
  if (std::system("python3 -c 'import numpy' 2>/dev/null") != 0) GTEST_SKIP() << "no numpy";
  const TempDir dir;
  std::vector<int32_t> tokens(300);
  std::iota(tokens.begin(), tokens.end(), 0);
  for (const auto& [descr, bytes] : {std::pair("|u1", 1), {"<u2", 2}, {"<i4", 4}, {"<i8", 8}}) {
    const std::string path = dir / "x.npy";
    const std::string script =
        fmt::format("import numpy; numpy.save('{}', numpy.arange(300).astype('{}'))", path, descr);
    ASSERT_EQ(std::system(("python3 -c \"" + script + "\"").c_str()), 0);
    EXPECT_EQ(read_file(path), npy_text(descr, tokens, bytes));
  }
}

TEST(TokenFiles, RangesOfSeveralFilesAreOneStream) {
  const TempDir dir;
  std::vector<int32_t> expected;
  Paths paths;
  for (uint64_t i = 0; i < 5; ++i) {
    const auto tokens = random_tokens(i == 2 ? 0 : 10 + 7 * i, kVocab, i);
    expected.insert(expected.end(), tokens.begin(), tokens.end());
    paths.push_back(dir / (std::to_string(i) + ".bin"));
    write_bytes(paths.back(), tokens_as(tokens, 2));
  }
  const TokenFiles source(paths, 0, kVocab);
  ASSERT_EQ(source.tokens(), int64_t(expected.size()));
  expected.insert(expected.end(), 6, -1);
  for (size_t begin = 0; begin + 6 < expected.size(); ++begin) {
    for (const size_t count : {1, 6, 40}) {
      if (begin + count > expected.size()) continue;
      std::vector<int32_t> found(count);
      source.read(int64_t(begin), found);
      ASSERT_TRUE(std::equal(found.begin(), found.end(), expected.begin() + long(begin)))
          << begin << " " << count;
    }
  }
}

TEST(TokenFiles, HoldsOutTheLastDocumentsOfEachFile) {
  const TempDir dir;
  const std::vector<int32_t> a = random_tokens(100, kVocab, 1), b = random_tokens(40, kVocab, 2);
  write_megatron(dir / "a", a, {10, 20, 30, 15, 25});
  write_bytes(dir / "b.bin", tokens_as(b, 2));
  const TokenFiles source(Paths{dir / "a.bin", dir / "b.bin"}, 0.4, kVocab);
  std::vector<int32_t> training(a.begin(), a.begin() + 60), held_out(a.begin() + 60, a.end());
  training.insert(training.end(), b.begin(), b.begin() + 24);  // no documents: by tokens
  held_out.insert(held_out.end(), b.begin() + 24, b.end());
  EXPECT_EQ(all_tokens(source), training);
  ASSERT_TRUE(source.held_out().stream);
  EXPECT_EQ(all_tokens(*source.held_out().stream), held_out);
  EXPECT_EQ(all_tokens(TokenFiles(Paths{dir / "a.bin"}, 0.01, kVocab)).size(),
            75u);  // at least one
}

TEST(TokenFiles, FingerprintFollowsContentAndSplit) {
  const TempDir dir;
  const auto tokens = random_tokens(50, kVocab);
  write_bytes(dir / "a.bin", tokens_as(tokens, 2));
  write_bytes(dir / "copy.bin", tokens_as(tokens, 2));
  auto changed = tokens;
  changed[49] ^= 1;
  write_bytes(dir / "b.bin", tokens_as(changed, 2));
  const auto fingerprint = [&](const char* name, double fraction) {
    return TokenFiles(Paths{dir / name}, fraction, kVocab).fingerprint();
  };
  EXPECT_EQ(fingerprint("a.bin", 0), fingerprint("copy.bin", 0));
  EXPECT_NE(fingerprint("a.bin", 0), fingerprint("b.bin", 0));
  EXPECT_NE(fingerprint("a.bin", 0), fingerprint("a.bin", 0.2));
}

TEST(TokenFiles, TokensOutsideOfTheVocabularyAreNamed) {
  const TempDir dir;
  auto tokens = random_tokens(50, 1000);
  tokens[31] = 1000;
  write_bytes(dir / "x.bin", tokens_as(tokens, 2));
  EXPECT_EQ(refusal_of(dir / "x.bin", 1000),
            dir / "x.bin" + ": token 31 is 1000: expected 0 to 999, below model.vocab");
  EXPECT_EQ(refusal_of(dir / "x.bin", 1001), "");
  tokens[31] = -5;
  write_bytes(dir / "x.npy", npy_text("<i8", tokens, 8));
  EXPECT_THAT(refusal_of(dir / "x.npy", 1000), HasSubstr("token 31 is -5: expected 0 to 999"));
}

TEST(TokenFiles, UnsampledTokensOutsideOfTheVocabularyAreNamedWhenRead) {
  const TempDir dir;
  constexpr int64_t kTokens = 20 << 20;  // above what is read as a run begins
  write_bytes(dir / "x.bin", "");
  std::filesystem::resize_file(dir / "x.bin", kTokens * 2);
  constexpr int64_t kAt = 100'000;  // between the first and the second sampled block
  {
    std::fstream file(dir / "x.bin", std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(kAt * 2);
    file << "\xff\xff";
  }
  const TokenFiles source(Paths{dir / "x.bin"}, 0, kVocab);
  std::vector<int32_t> tokens(10);
  source.read(kAt - 10, tokens);
  EXPECT_THAT(error_of([&] { source.read(kAt - 9, tokens); }),
              HasSubstr("x.bin: token 100000 is 65535: expected 0 to 256"));
}

TEST(TokenFiles, DamagedHeadersAreNamed) {
  const TempDir dir;
  const auto tokens = random_tokens(60, kVocab);
  const IndexFixture good{.lengths = {10, 20, 30}, .documents = {0, 1, 2}};
  const auto with_index = [&](const std::string& index) {
    write_bytes(dir / "x.bin", tokens_as(tokens, 2));
    write_bytes(dir / "x.idx", index);
    return refusal_of(dir / "x.bin");
  };
  const std::string idx = dir / "x.idx: damaged index: ";
  EXPECT_EQ(with_index(good.text()), "");
  EXPECT_EQ(with_index("TNTIDX\0\0"),
            dir / "x.idx: does not begin as an index of Megatron-LM does");
  IndexFixture index = good;
  index.version = 2;
  EXPECT_EQ(with_index(index.text()), idx + "has version 2: expected 1");
  index = good;
  index.type_code = 7;
  EXPECT_EQ(with_index(index.text()),
            idx + "has type code 7: expected an integer type, 1 to 5 or 8");
  index = good;
  index.lengths[1] = 21;
  EXPECT_EQ(with_index(index.text()),
            idx +
                "sequence 2 begins at byte 62 with 30 tokens of 2 bytes: expected its end to be "
                "the end of the .bin file, byte 120");
  index = good;
  index.documents[1] = 7;
  EXPECT_EQ(with_index(index.text()), idx + "document 1 begins at sequence 7: expected 0 to 3");
  EXPECT_EQ(with_index(good.text() + "xx"),
            idx + "holds 104 bytes: expected 102 for 3 sequences and 4 document entries");
  write_bytes(dir / "odd.bin", "abc");
  EXPECT_EQ(refusal_of(dir / "odd.bin"), dir /
                                             "odd.bin: holds 3 bytes and has no .idx: expected "
                                             "uint16 tokens, an even number");
  const auto with_npy = [&](std::string text, const std::string& from, const std::string& to) {
    const size_t at = text.find(from);
    text.replace(at, from.size(), to);
    write_bytes(dir / "x.npy", text);
    return refusal_of(dir / "x.npy");
  };
  const std::string npy = npy_text("<u2", tokens, 2);
  EXPECT_EQ(with_npy(npy, "<u2", "<u2"), "");
  EXPECT_THAT(with_npy(npy, "<u2", ">u2"), HasSubstr("its header has the type '>u2': expected"));
  EXPECT_THAT(with_npy(npy, "<u2", "<f4"), HasSubstr("its header has the type '<f4': expected"));
  EXPECT_THAT(with_npy(npy, "False", "True "), HasSubstr("Fortran order: expected C order"));
  EXPECT_THAT(with_npy(npy, "(60,), }", "(30, 2)}"), HasSubstr("several dimensions: expected one"));
  EXPECT_THAT(with_npy(npy, "(60,)", "(61,)"),
              HasSubstr("holds 248 bytes: expected 250 for 61 tokens of uint16"));
}

/// Cuts files at every byte of their headers and flips `bits` bits of each.
void expect_refused_or_equal(int bits) {
  const TempDir dir;
  const auto tokens = random_tokens(60, 200);
  const IndexFixture index{.lengths = {10, 20, 30}, .documents = {0, 1, 2}};
  write_bytes(dir / "x.bin", tokens_as(tokens, 2));
  int refused = 0, equal = 0;
  const auto open_damaged = [&](const std::string& file, const std::string& source,
                                const std::string& text, const std::string& what) {
    write_bytes(dir / file, text);
    try {
      EXPECT_EQ(all_tokens(TokenFiles(Paths{dir / source}, 0, kVocab)), tokens) << what;
      all_tokens(TokenFiles(Paths{dir / source}, 0.3, kVocab));
      ++equal;
    } catch (const IoError& error) {
      EXPECT_THAT(error.what(), HasSubstr(dir / file)) << what;
      ++refused;
    }
  };
  const std::string idx = index.text(), npy = npy_text("<u2", tokens, 2);
  const size_t npy_header = npy.size() - 2 * tokens.size();
  for (size_t size = 0; size < idx.size(); ++size) {
    open_damaged("x.idx", "x.bin", idx.substr(0, size), fmt::format("cut {}", size));
  }
  for (size_t size = 0; size < npy.size(); ++size) {
    open_damaged("x.npy", "x.npy", npy.substr(0, size), fmt::format("cut {}", size));
  }
  EXPECT_EQ(equal, 0);
  const auto flip = [&](const std::string& file, const std::string& source, std::string text,
                        size_t size) {
    for (size_t at = 0; at < size; ++at) {
      for (int i = 0; i < bits; ++i) {
        const int bit = bits == 8 ? i : int(philox(3, at, uint64_t(i))[0] % 8);
        text[at] = char(text[at] ^ 1 << bit);
        open_damaged(file, source, text, fmt::format("bit {} of {} byte {}", bit, file, at));
        text[at] = char(text[at] ^ 1 << bit);
      }
    }
  };
  flip("x.idx", "x.bin", idx, idx.size());
  flip("x.npy", "x.npy", npy, npy_header);
  EXPECT_GT(refused, 350 + 220 * bits);
  EXPECT_LT(equal, 4 * bits);
}

TEST(TokenFiles, DamagedFilesAreRefusedOrReadEqual) {
  expect_refused_or_equal(1);
}

TEST(TokenFilesLong, DamagedFilesAreRefusedOrReadEqual) {
  expect_refused_or_equal(8);
}

TEST(TokenFiles, ShardsThatChangeOrVanishAreNamed) {
  const TempDir dir;
  const auto tokens = random_tokens(5000, kVocab);
  const std::string path = dir / "x.bin";
  const auto read_error = [](const TokenFile& file) {
    std::vector<int32_t> found(10);
    return error_of([&] { file.read(4990, found); });
  };
  for (const bool stays_open : {true, false}) {
    write_bytes(path, tokens_as(tokens, 2));
    const TokenFile file(path, 0, kVocab, stays_open);
    EXPECT_EQ(read_error(file), "");
    std::filesystem::last_write_time(path, std::filesystem::file_time_type::clock::now());
    EXPECT_EQ(read_error(file), "");  // written, with equal content
    std::filesystem::resize_file(path, 5000);
    EXPECT_THAT(read_error(file), HasSubstr(path + ": changed while it is trained on: holds 5000 "
                                                   "bytes: expected the 10000 bytes"));
    EXPECT_THAT(error_of([&] { file.verify(); }), HasSubstr(path));
  }
  write_bytes(path, tokens_as(tokens, 2));
  const TokenFile open(path, 0, kVocab, true), reopened(path, 0, kVocab, false);
  std::filesystem::remove(path);
  EXPECT_EQ(read_error(open), "");
  EXPECT_THAT(read_error(reopened), HasSubstr(path + ": cannot open: No such file"));
  write_bytes(path, tokens_as(random_tokens(5000, kVocab, 1), 2));
  EXPECT_EQ(read_error(open), "");
  EXPECT_THAT(read_error(reopened),
              HasSubstr(path + ": changed while it is trained on: holds other"));
}

TEST(TokenFiles, LargeFilesAreOpenedAndVerifiedWithoutReadingThem) {
  const TempDir dir;
  constexpr int64_t kTokens = 50'000'000'000;  // 100 GB, sparse
  write_bytes(dir / "raw.bin", "");
  std::filesystem::resize_file(dir / "raw.bin", uint64_t(kTokens) * 2);
  struct stat status {};
  ASSERT_EQ(::stat((dir / "raw.bin").c_str(), &status), 0);
  ASSERT_LT(status.st_blocks, 1000);
  const uint64_t before = file_bytes_moved();
  const TokenFiles source(Paths{dir / "raw.bin"}, 0.01, kVocab);
  source.verify();
  const uint64_t moved = file_bytes_moved() - before;
  EXPECT_GT(moved, 0);
  EXPECT_LT(moved, 20 << 20);
  EXPECT_EQ(source.tokens(), kTokens - kTokens / 100);
  std::vector<int32_t> last(8);
  source.read(source.tokens() - 4, last);
  EXPECT_EQ(last, (std::vector<int32_t>{0, 0, 0, 0, -1, -1, -1, -1}));
}

TEST(TokenFiles, LargeIndicesAreCheckedInPart) {
  const TempDir dir;
  constexpr int64_t kSequences = 6'000'000, kTokens = 1000;  // all in the last sequence
  const std::string idx = dir / "x.idx";
  write_bytes(dir / "x.bin", tokens_as(random_tokens(kTokens, kVocab), 2));
  const std::string header = std::string("MMIDIDX\0\0", 9) + little_endian(1, 8) +
                             little_endian(8, 1) + little_endian(kSequences, 8) +
                             little_endian(kSequences + 1, 8);
  write_bytes(idx, header);
  std::filesystem::resize_file(idx, 34 + 12 * kSequences + 8 * (kSequences + 1));
  const auto write_at = [&](int64_t offset, const std::string& bytes) {
    std::fstream file(idx, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(offset);
    file << bytes;
  };
  const int64_t lengths = 34, entries = lengths + 12 * kSequences;
  write_at(lengths + 4 * (kSequences - 1), little_endian(kTokens, 4));
  write_at(entries + 8 * kSequences, little_endian(kSequences, 8));
  EXPECT_EQ(refusal_of(dir / "x.bin"), "");
  write_at(lengths + 4 * 10, little_endian(-1, 4));
  EXPECT_THAT(refusal_of(dir / "x.bin"), HasSubstr("sequence 10 begins at byte 0 with -1 tokens"));
  write_at(lengths + 4 * 10, little_endian(0, 4));
  write_at(lengths + 4 * (kSequences - 1), little_endian(kTokens + 1, 4));
  EXPECT_THAT(refusal_of(dir / "x.bin"), HasSubstr("sequence 5999999 begins at byte 0 with 1001"));
  write_at(lengths + 4 * (kSequences - 1), little_endian(kTokens, 4));
  write_at(entries + 8 * kSequences, little_endian(kSequences - 1, 8));
  EXPECT_THAT(refusal_of(dir / "x.bin"),
              HasSubstr("document 6000000 begins at sequence 5999999: expected 6000000"));
}

TEST(StreamWindows, EveryTokenButTheFirstIsScoredOnceAfterThoseBefore) {
  const TempDir dir;
  for (const size_t size : {2, 7, 8, 9, 40}) {
    const std::vector<int32_t> tokens = random_tokens(size, kVocab, size);
    write_bytes(dir / "x.bin", tokens_as(tokens, 2));
    const auto stream = std::make_shared<TokenFiles>(Paths{dir / "x.bin"}, 0, kVocab);
    for (const int64_t stride : {1, 3, 8}) {
      constexpr int64_t kSeq = 8;
      const StreamWindows windows(stream, kSeq, stride, 0);
      std::vector<int> scored(size);
      for (int64_t i = 0; i < windows.count(); ++i) {
        const ScoredWindow window = windows.read(i);
        ASSERT_EQ(window.tokens.size(), window.targets.size());
        for (size_t j = 0; j < window.tokens.size(); ++j) {
          const size_t position = size_t(i * stride) + j;
          EXPECT_EQ(window.tokens[j], tokens[position]);
          if (window.targets[j] < 0) continue;
          EXPECT_EQ(window.targets[j], tokens[position + 1]);
          ++scored[position + 1];
        }
      }
      std::vector<int> expected(size, 1);
      expected[0] = 0;
      EXPECT_EQ(scored, expected) << size << " by " << stride;
    }
  }
}

TEST(OpenData, ChoosesTheFormatByTheNamesOfFiles) {
  const TempDir dir;
  for (const char* folder : {"tokens", "mixed", "text"}) {
    std::filesystem::create_directories(dir / folder);
  }
  const auto tokens = random_tokens(60, kVocab);
  write_megatron(dir / "tokens/a", tokens, {30, 30});
  write_bytes(dir / "tokens/b.npy", npy_text("<u2", tokens, 2));
  write_bytes(dir / "mixed/a.bin", tokens_as(tokens, 2));
  write_bytes(dir / "mixed/readme", "text");
  write_bytes(dir / "text/readme", "text");
  TrainConfig config;
  const auto describe = [&](const Paths& paths) {
    config.data.paths = paths;
    return error_of([&] { throw ConfigError(open_configured(config)->describe()); });
  };
  EXPECT_EQ(describe({dir / "tokens"}), "2 token files, 120 tokens of 2 documents");
  EXPECT_EQ(describe({dir / "tokens/a"}), "1 token file, 60 tokens of 2 documents");
  EXPECT_EQ(describe({dir / "tokens/a.idx"}), "1 token file, 60 tokens of 2 documents");
  EXPECT_EQ(describe({dir / "tokens/a.bin", dir / "tokens/a.idx"}),
            "1 token file, 60 tokens of 2 documents");
  EXPECT_EQ(describe({dir / "tokens/*.npy"}), "1 token file, 60 tokens");
  EXPECT_EQ(describe({dir / "mixed"}), "1 token file, 60 tokens");
  EXPECT_EQ(describe({dir / "text"}), "1 files, 4 bytes of text, 0 files held out");
  EXPECT_THAT(describe({dir / "tokens", dir / "text"}),
              HasSubstr("tokens holds tokens, " + dir / "text text: expected one format"));
  config.data.format = "text";
  EXPECT_EQ(describe({dir / "mixed"}), "1 files, 4 bytes of text, 0 files held out");
  EXPECT_THAT(describe({dir / "tokens"}), HasSubstr("3 files, none of text"));
  config.data.format = "tokens";
  EXPECT_EQ(describe({dir / "mixed"}), "1 token file, 60 tokens");
  EXPECT_THAT(describe({dir / "mixed/readme"}), HasSubstr("readme: no token file"));
}

}  // namespace
}  // namespace tandem
