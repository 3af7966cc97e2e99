#include "core/system/files.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/system/json.h"
#include "core/system/output.h"
#include "tandem/error.h"
#include "tests/engine/train/temp_dir.h"
#include "tests/error_of.h"

namespace tandem {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(ReadFile, RefusesOtherThanRegularFilesAtOnce) {
  const TempDir dir;
  ASSERT_EQ(::mkfifo((dir / "fifo").c_str(), 0600), 0);
  EXPECT_THAT(error_of<IoError>([&] { read_file(dir / "fifo"); }),
              HasSubstr("fifo: expected a regular file, found a pipe"));
  EXPECT_THAT(error_of<IoError>([&] { read_file(dir.path()); }), HasSubstr("found a directory"));
  EXPECT_THAT(error_of<IoError>([&] { read_file(dir.path(), Source::any); }),
              HasSubstr("found a directory"));
  EXPECT_THAT(error_of<IoError>([&] { read_file("/dev/null"); }), HasSubstr("found a device"));
  EXPECT_THAT(error_of<IoError>([&] { read_file(dir / "none"); }),
              HasSubstr("none: cannot open: No such"));
}

TEST(ReadFile, ReadsPipesToTheirEndIfAllowed) {
  const TempDir dir;
  const std::string fifo = dir / "fifo", text(300'000, 'x');
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  std::thread writer([&] { write_bytes(fifo, text); });
  EXPECT_EQ(read_file(fifo, Source::any), text);
  writer.join();
  EXPECT_EQ(read_file("/dev/null", Source::any), "");
  EXPECT_THAT(error_of<IoError>([&] { read_file("/dev/zero", Source::any); }),
              HasSubstr("/dev/zero: a device without an end within 256 MiB"));
}

TEST(ReadFile, DoesNotTrustTheSize) {
  EXPECT_THAT(read_file("/proc/self/status"), HasSubstr("VmPeak"));  // its size is 0
}

TEST(ReplaceFile, ReplacesFilesOfAnyKind) {
  const TempDir dir;
  const std::string path = dir / "file";
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  replace_file(path, "one");
  EXPECT_EQ(read_file(path), "one");
  replace_file(path, "two");
  EXPECT_EQ(read_file(path), "two");
  std::filesystem::create_directories(dir / "folder/inside");
  EXPECT_THAT(error_of<IoError>([&] { replace_file(dir / "folder", "x"); }),
              HasSubstr("folder: cannot replace: "));
}

TEST(ReplaceFile, ConcurrentWritersDoNotShareATemporaryName) {
  const TempDir dir;
  const std::string path = dir / "page";
  {
    const FileDescriptor other(path + ".tmp", O_WRONLY | O_CREAT);  // being written
    ASSERT_EQ(::flock(other.get(), LOCK_EX), 0);
    write_at(other.get(), path, "half", 4, 0);
    replace_file(path, "whole");
    EXPECT_EQ(read_file(path), "whole");
    EXPECT_EQ(read_file(path + ".tmp"), "half");
  }
  replace_file(path, "next");  // the other was interrupted
  EXPECT_THAT(names_in(dir.path()), ElementsAre("page"));
  std::vector<std::thread> writers;
  for (const char letter : {'a', 'b', 'c', 'd'}) {
    writers.emplace_back([&, letter] {
      for (int i = 0; i < 20; ++i) replace_file(path, std::string(100'000, letter));
    });
  }
  for (int i = 0; i < 100; ++i) {
    const std::string text = read_file(path);
    EXPECT_TRUE(text == "next" || text == std::string(100'000, text[0]));
  }
  for (std::thread& writer : writers) writer.join();
  EXPECT_THAT(names_in(dir.path()), ElementsAre("page"));
}

TEST(Files, LinksAreRejectedInPlaceOfFolders) {
  const TempDir dir;
  std::filesystem::create_directories(dir / "real");
  std::filesystem::create_symlink(dir / "real", dir / "link");
  EXPECT_NO_THROW(reject_link(dir / "real"));
  EXPECT_NO_THROW(reject_link(dir / "none"));
  EXPECT_THAT(error_of<IoError>([&] { reject_link(dir / "link"); }),
              HasSubstr("link: a symbolic link"));
}

TEST(Files, UnexpectedSymlinksAreNotFollowed) {
  const TempDir dir;
  write_bytes(dir / "mine", "text");
  std::filesystem::create_symlink(dir / "mine", dir / "link");
  EXPECT_THAT(error_of<IoError>([&] { write_file(dir / "link", "x"); }),
              HasSubstr("link: a symbolic link: expected a file of its own"));
  EXPECT_THAT(error_of<IoError>([&] { read_file(dir / "link", Source::no_link); }),
              HasSubstr("link: a symbolic link"));
  EXPECT_EQ(read_file(dir / "link"), "text");
  std::filesystem::create_symlink(dir / "mine", dir / "link.tmp");
  replace_file(dir / "link", "new");
  EXPECT_EQ(read_file(dir / "link", Source::no_link), "new");
  EXPECT_EQ(read_file(dir / "mine"), "text");
}

TEST(Files, HaveTheModeOfTheUmask) {
  const TempDir dir;
  for (const mode_t mask : {0002, 0077}) {
    const mode_t before = ::umask(mask);
    write_file(dir / "a", "x");
    replace_file(dir / "b", "x");
    write_output(dir / "c", "x");
    ::umask(before);
    for (const char* name : {"a", "b", "c"}) {
      struct stat status {};
      ASSERT_EQ(::stat((dir / name).c_str(), &status), 0);
      EXPECT_EQ(status.st_mode & 0777, 0666 & ~mask) << name;
      std::filesystem::remove(dir / name);
    }
  }
}

TEST(Files, AreWrittenIfTheFileSystemCannotSync) {
  EXPECT_THAT(error_of<IoError>([] { sync_file(-1, "x"); }), HasSubstr("x: cannot sync: Bad file"));
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);  // EINVAL, as for a folder of FUSE or CIFS
  EXPECT_NO_THROW(sync_file(ends[1], "x"));
  ::close(ends[0]), ::close(ends[1]);
}

TEST(MakeDirectories, CreatesAllMissingDirectories) {
  const TempDir dir;
  make_directories(dir / "a/b/c/");
  make_directories(dir / "a/b/c");
  EXPECT_TRUE(std::filesystem::is_directory(dir / "a/b/c"));
  write_bytes(dir / "file", "");
  EXPECT_THAT(error_of<IoError>([&] { make_directories(dir / "file/x"); }),
              HasSubstr("file/x: cannot create the directory"));
}

TEST(NamesIn, ListsNamesOrNamesTheError) {
  const TempDir dir;
  write_bytes(dir / "b", "");
  write_bytes(dir / "a", "");
  EXPECT_THAT(names_in(dir.path()), ElementsAre("a", "b"));
  EXPECT_THAT(names_in(dir / "none"), ElementsAre());
  EXPECT_THAT(error_of<IoError>([&] { names_in(dir / "a"); }),
              HasSubstr("a: cannot list: Not a directory"));
}

TEST(ContentHash, HashOfARangeIsThatOfItsBytes) {
  const TempDir dir;
  const std::string text = std::string(3'000'000, 'x') + "end", path = dir / "file";
  write_bytes(path, text);
  const FileDescriptor file = open_for_reading(path);
  EXPECT_EQ(content_hash(file.get(), path, 0, text.size()), content_hash(text));
  EXPECT_EQ(content_hash(file.get(), path, 7, 2'999'990), content_hash(text.substr(7, 2'999'990)));
  EXPECT_THAT(error_of<IoError>([&] { content_hash(file.get(), path, 10, text.size()); }),
              HasSubstr("ends at byte 3000003: expected 3000013"));
}

TEST(DumpJson, ReplacesBytesThatAreNotUtf8) {
  const nlohmann::ordered_json json{{"path", "a\xff/\xe2\x82"}, {"bad\xfe", 1}};
  EXPECT_EQ(dump_json(json), "{\"path\":\"a\xef\xbf\xbd/\xef\xbf\xbd\",\"bad\xef\xbf\xbd\":1}");
  EXPECT_TRUE(parse_json<nlohmann::ordered_json>(dump_json(json, 1)).is_object());
}

TEST(ParseJson, RefusesDeepNestingBeforeItIsParsed) {
  const auto nested = [](size_t depth) {
    return std::string(depth, '[') + std::string(depth, ']');
  };
  EXPECT_FALSE(parse_json(nested(100)).is_discarded());
  EXPECT_TRUE(parse_json(nested(101)).is_discarded());
  EXPECT_TRUE(parse_json(nested(1'000'000)).is_discarded());
  EXPECT_TRUE(parse_json("{\"a\":").is_discarded());
  EXPECT_EQ(parse_json("{\"a[[\\\"{\":[{}]}").size(), 1u);  // brackets in strings do not count
  EXPECT_TRUE(parse_json("\"" + std::string(200, '[') + "\"").is_string());
}

/// Random JSON, some of it damaged, with keys that repeat.
std::string random_json(std::mt19937& random, int depth) {
  const auto below = [&](unsigned bound) { return random() % bound; };
  if (depth == 0 || below(3) == 0) {
    constexpr const char* kValues[] = {"null",           "true",  "-3", "1.5e3",
                                       "\"\\u00e9\\n\"", "1e999", "x"};
    return kValues[below(60) == 0 ? 5 + below(2) : below(5)];
  }
  const bool is_object = below(2) == 0;
  std::string text;
  for (unsigned i = 0, count = below(is_object ? 60 : 4); i < count; ++i) {
    if (i > 0) text += ",";
    if (is_object) text += "\"k" + std::to_string(below(40)) + "\":";
    text += random_json(random, depth - 1);
  }
  return is_object ? "{" + text + "}" : "[" + text + "]";
}

TEST(ParseJson, OrderedIsThatOfTheLibrary) {
  using Ordered = nlohmann::ordered_json;
  std::mt19937 random(5);
  int valid = 0;
  for (int i = 0; i < 1000; ++i) {
    const std::string text = random_json(random, 3);
    const Ordered want = Ordered::parse(text, nullptr, false), found = parse_json<Ordered>(text);
    ASSERT_EQ(found.is_discarded(), want.is_discarded()) << text;
    if (want.is_discarded()) continue;
    ASSERT_EQ(found.dump(), want.dump()) << text;
    ++valid;
  }
  EXPECT_GT(valid, 200);
  EXPECT_LT(valid, 1000);
}

TEST(ParseJson, TimeOfOrderedIsLinearInTheKeys) {
  std::string text = "{\"0\":0";
  constexpr int kKeys = 400'000;
  for (int i = 1; i < kKeys; ++i) text += ",\"" + std::to_string(i) + "\":0";
  EXPECT_EQ(parse_json<nlohmann::ordered_json>(text + "}").size(), size_t(kKeys));
}

}  // namespace
}  // namespace tandem
