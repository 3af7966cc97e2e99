#include "engine/data/manifest.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "core/system/files.h"
#include "engine/data/corpus.h"
#include "engine/data/tokens/token_files.h"
#include "tandem/error.h"
#include "tandem/random.h"
#include "tests/engine/train/temp_dir.h"
#include "tests/error_of.h"

namespace tandem {
namespace {

using ::testing::HasSubstr;
using Paths = std::vector<std::string>;

constexpr uint64_t kSampledBytes = uint64_t(20) << 20;  // above 16 MiB

void make_sparse(const std::string& path, uint64_t bytes) {
  write_bytes(path, "begin");
  std::filesystem::resize_file(path, bytes);
}

void write_at_byte(const std::string& path, uint64_t offset, std::string_view text) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(long(offset));
  file << text;
}

Manifest through_a_file(const TempDir& dir, const std::vector<FileRecord>& records) {
  write_bytes(dir / "manifest.json", Manifest(records).to_json());
  return Manifest::read(dir / "manifest.json");
}

TEST(Manifest, TextWithARecordIsNotReadAgain) {
  const TempDir dir;
  make_sparse(dir / "a", kSampledBytes);
  make_sparse(dir / "b", kSampledBytes + 1);
  write_bytes(dir / "small", "text");
  const Paths paths{dir / "a", dir / "b", dir / "small"};
  const Corpus first(paths, 0.5);
  ASSERT_EQ(first.records().size(), 2u);
  const Manifest known = through_a_file(dir, first.records());
  const uint64_t before = file_bytes_moved();
  const Corpus second(paths, 0.5, nullptr, known);
  EXPECT_LT(file_bytes_moved() - before, 5 << 20);
  EXPECT_EQ(second.fingerprint(), first.fingerprint());
  EXPECT_EQ(second.held_out().files, first.held_out().files);
  run_threads({.ranks = 2}, [&](Communicator& comm) {
    EXPECT_EQ(Corpus(paths, 0.5, &comm, known).fingerprint(), first.fingerprint());
  });
}

TEST(Manifest, TextOf100GigabytesBeginsFromItsRecord) {
  const TempDir dir;
  make_sparse(dir / "text", 100'000'000'000);
  DataFile file(dir / "text", false);
  file.sample(nullptr);
  FileRecord record = make_record(file);
  record.hash = 0x1234;  // hashing the file would take a minute
  const uint64_t before = file_bytes_moved();
  const Corpus corpus(Paths{dir / "text"}, 0, nullptr, through_a_file(dir, {record}));
  const uint64_t moved = file_bytes_moved() - before;
  EXPECT_GT(moved, 0);
  EXPECT_LT(moved, 5 << 20);
  EXPECT_EQ(corpus.tokens(), 100'000'000'001);
}

TEST(Manifest, TextThatWasWrittenToIsHashedAgain) {
  const TempDir dir;
  make_sparse(dir / "a", kSampledBytes);
  const Corpus first(Paths{dir / "a"}, 0);
  const Manifest known = through_a_file(dir, first.records());
  const auto open = [&] { Corpus(Paths{dir / "a"}, 0, nullptr, known); };
  std::filesystem::last_write_time(dir / "a", std::filesystem::file_time_type::clock::now());
  EXPECT_EQ(error_of(open), "");
  write_at_byte(dir / "a", 100'000, "x");  // between samples
  EXPECT_EQ(error_of(open),
            fmt::format("{}: holds other bytes: expected those it had, as {} says (`tandem data "
                        "index` makes it anew)",
                        dir / "a", dir / "manifest.json"));
  std::filesystem::resize_file(dir / "a", kSampledBytes + 2);
  EXPECT_THAT(error_of(open), HasSubstr("holds 20971522 bytes: expected 20971520, as"));
}

TEST(Manifest, TokenFilesAreComparedWithTheirRecords) {
  const TempDir dir;
  make_sparse(dir / "x.bin", kSampledBytes);
  const auto open = [&](const Manifest& known) {
    return TokenFiles(Paths{dir / "x.bin"}, 0, 65536, nullptr, known);
  };
  const Manifest known = through_a_file(dir, open({}).records());
  EXPECT_TRUE(open(known).notes().empty());
  write_at_byte(dir / "x.bin", 100'000, "x");  // between samples
  EXPECT_THAT(open(known).notes(),
              ::testing::ElementsAre(dir / "x.bin was written to after " + dir / "manifest.json" +
                                     " was made; its samples are the same"));
  write_at_byte(dir / "x.bin", 1000, "x");
  EXPECT_THAT(error_of([&] { open(known); }),
              HasSubstr(dir / "x.bin: holds other bytes: expected those it had, as"));
}

TEST(Manifest, DamagedFilesAreNamed) {
  const TempDir dir;
  const FileRecord record{"/data/\"x\"", 7, 8, 9, 10};
  const std::string good = Manifest({record}).to_json();
  const auto read = [&](const std::string& text) {
    write_bytes(dir / "m", text);
    return error_of([&] { Manifest::read(dir / "m"); });
  };
  EXPECT_EQ(read(good), "");
  EXPECT_EQ(Manifest::read(dir / "m").to_json(), good);
  const std::string unread = Manifest({{"/data/x", 7, 8, {}, {}}}).to_json();
  EXPECT_EQ(read(unread), "");
  EXPECT_EQ(Manifest::read(dir / "m").to_json(), unread);
  for (size_t size = 0; size + 1 < good.size(); ++size) {
    EXPECT_THAT(read(good.substr(0, size)), HasSubstr(dir / "m: no manifest of data: ")) << size;
  }
  for (size_t at = 0; at < good.size(); ++at) {
    std::string changed = good;
    changed[at] = char(changed[at] ^ 1 << philox(1, 2, at)[0] % 8);
    const std::string message = read(changed);
    EXPECT_TRUE(message == "" || message.starts_with(dir / "m: no manifest")) << message;
    EXPECT_EQ(message.find('\n'), std::string::npos);
  }
  EXPECT_THAT(error_of([&] { Manifest::read(dir / "none"); }), HasSubstr("none: cannot open"));
}

}  // namespace
}  // namespace tandem
