// The tuner's file with many writers, and when damaged.
#include "tune/tuner_file.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/system/file_descriptor.h"
#include "core/system/files.h"
#include "core/version.h"
#include "tandem/error.h"

namespace tandem::test {
namespace {

using Json = nlohmann::json;
using testing::HasSubstr;
namespace fs = std::filesystem;

class TunerFile : public testing::Test {
 protected:
  void SetUp() override {
    std::string made = (fs::temp_directory_path() / "tuner_file_XXXXXX").string();
    ASSERT_NE(mkdtemp(made.data()), nullptr);
    folder_ = made;
    path_ = (folder_ / "tuner.json").string();
  }
  void TearDown() override { fs::remove_all(folder_); }

  static Json times(double us) { return {{"measured_us", {{"serial", us}}}}; }
  std::vector<std::string> files() const {
    std::vector<std::string> names;
    for (const auto& file : fs::directory_iterator(folder_))
      names.push_back(file.path().filename());
    std::sort(names.begin(), names.end());
    return names;
  }
  // Reads the file; returns its warnings on standard error.
  std::string said(Json& entries) const {
    testing::internal::CaptureStderr();
    entries = read_tuner_file(path_);
    return testing::internal::GetCapturedStderr();
  }

  fs::path folder_;
  std::string path_;
};

TEST_F(TunerFile, KeepsEntriesOfEveryWriter) {
  constexpr int kWriters = 8, kEach = 12;
  std::vector<pid_t> writers;
  for (int writer = 0; writer < kWriters; ++writer) {
    const pid_t child = fork();
    if (child == 0) {
      int status = 0;
      try {
        for (int i = 0; i < kEach; ++i) {
          const std::string key = std::to_string(writer) + " " + std::to_string(i);
          // Long enough for all other writers to finish first.
          const std::chrono::seconds wait(50);
          merge_into_tuner_file(path_, {{key, times(i)}}, wait);
          // Every writer adds to this entry.
          merge_into_tuner_file(path_, {{"all", {{"measured_us", {{key, 1.5}}}}}}, wait);
        }
      } catch (const std::exception&) {
        status = 1;
      }
      _exit(status);
    }
    writers.push_back(child);
  }
  for (const pid_t writer : writers) {
    int status = 0;
    waitpid(writer, &status, 0);
    EXPECT_EQ(status, 0);
  }
  const Json entries = read_tuner_file(path_);
  EXPECT_EQ(entries.size(), size_t(kWriters * kEach + 1));
  EXPECT_EQ(entries.at("all").at("measured_us").size(), size_t(kWriters * kEach));
  EXPECT_EQ(entries.at("3 7"), times(7));
  EXPECT_EQ(files(), (std::vector<std::string>{"tuner.json", "tuner.json.lock"}));
}

// Processes of two hosts or containers may have the same number.
TEST_F(TunerFile, WorksIfAnotherProcessHasTheSameNumber) {
  fs::create_directory(path_ + "." + std::to_string(getpid()));
  merge_into_tuner_file(path_, {{"a", times(1)}});
  EXPECT_EQ(read_tuner_file(path_).at("a"), times(1));
}

TEST_F(TunerFile, HasTheModeOfTheUmask) {
  const mode_t before = ::umask(0077);
  merge_into_tuner_file(path_, {{"all", times(1)}}, std::chrono::seconds(1));
  ::umask(before);
  for (const std::string& file : {path_, path_ + ".lock"}) {
    EXPECT_EQ(fs::status(file).permissions(), fs::perms::owner_read | fs::perms::owner_write)
        << file;
  }
}

TEST_F(TunerFile, TruncatedFileKeepsWholeEntries) {
  const std::vector<std::string> keys{"a | b \"{c}\" \\", "d", "e"};
  for (size_t i = 0; i < keys.size(); ++i)
    merge_into_tuner_file(path_, {{keys[i], times(double(i))}});
  const std::string whole = read_file(path_);
  std::vector<size_t> ends;  // of the entries, in the text
  for (size_t i = 0; i < keys.size(); ++i) {
    ends.push_back(whole.find("}\n }", i == 0 ? 0 : ends.back()) + 4);
  }
  const size_t version_end = whole.find('\n', whole.find(kVersion)) - 1;  // its comma
  for (size_t size = 0; size + 2 < whole.size(); ++size) {
    const std::string cut = whole.substr(0, size);
    write_file(path_, cut);
    fs::remove(path_ + ".damaged");
    Json entries;
    const std::string line = said(entries);
    const size_t remaining =
        size < version_end ? 0 : size_t(std::count_if(ends.begin(), ends.end(), [&](size_t end) {
          return end <= size;
        }));
    ASSERT_EQ(entries.size(), remaining) << cut;
    for (size_t i = 0; i < remaining; ++i) EXPECT_EQ(entries.at(keys[i]), times(double(i))) << cut;
    EXPECT_EQ(std::count(line.begin(), line.end(), '\n'), 1) << line;
    EXPECT_THAT(line, HasSubstr(path_ + ": damaged: " + std::to_string(remaining) + " whole entr"));
    EXPECT_EQ(read_file(path_ + ".damaged"), cut);
    // It has been repaired: there are no further warnings.
    EXPECT_EQ(said(entries), "");
    EXPECT_EQ(entries.size(), remaining);
  }
}

TEST_F(TunerFile, LosesOnlyTheDamagedEntry) {
  for (const char* key : {"a", "b", "c"}) merge_into_tuner_file(path_, {{key, times(1)}});
  const std::string whole = read_file(path_);
  const size_t at = whole.find("measured_us", whole.find("\"b\""));
  for (const char* damage : {"\"", "}", "\x01", "\xff\xfe", "{{{", "\\"}) {
    std::string text = whole;
    text.replace(at + 4, 1, damage);
    write_file(path_, text);
    Json entries;
    EXPECT_THAT(said(entries), HasSubstr("damaged: "));
    EXPECT_TRUE(entries.contains("a")) << damage;
    EXPECT_TRUE(entries.contains("c")) << damage;
    EXPECT_FALSE(entries.contains("b")) << damage;
    EXPECT_EQ(read_file(path_ + ".damaged"), text);
  }
  // Valid JSON with invalid times.
  const Json good = Json::parse(whole);
  for (const Json& damage :
       {Json(7), Json{{"measured_us", 1}},
        Json{{"measured_us", {{"serial", 1}}}, {"load", "high"}, {"time", 1}}}) {
    Json file = good;
    file["b"] = damage;
    write_file(path_, file.dump());
    Json entries;
    EXPECT_THAT(said(entries), HasSubstr("2 whole entries kept")) << damage;
    EXPECT_EQ(entries, (Json{{"a", times(1)}, {"c", times(1)}})) << damage;
  }
}

TEST_F(TunerFile, FileOfAnotherReleaseIsIgnored) {
  // The second was once written by this release, with keys that named neither cores nor build.
  for (const char* writer : {"0.0.1", kVersion}) {
    write_file(path_, Json{{"tandem", writer}, {"a", times(1)}}.dump());
    EXPECT_TRUE(read_tuner_file(path_).empty());
  }
  EXPECT_TRUE(salvaged_entries("{\"tandem\": \"0.0.1\", \"a\": {\"measured_us\": {}}").empty());
  merge_into_tuner_file(path_, {{"b", times(2)}});
  EXPECT_EQ(read_tuner_file(path_), (Json{{"b", times(2)}}));
}

TEST_F(TunerFile, UnrepairableFileIsStillRead) {
  merge_into_tuner_file(path_, {{"a", times(1)}, {"b", times(2)}});
  const std::string whole = read_file(path_);
  write_file(path_, whole.substr(0, whole.size() - 5));
  fs::remove(path_ + ".lock");
  fs::create_directory(path_ + ".lock");  // which cannot be opened as a file
  Json entries;
  EXPECT_THAT(said(entries), HasSubstr("damaged, not repaired"));
  EXPECT_EQ(entries, (Json{{"a", times(1)}}));
}

// Each wait for the lock would exceed this program's time limit in CTest.
TEST_F(TunerFile, LockHeldElsewhereCostsOneShortWait) {
  merge_into_tuner_file(path_, {{"a", times(1)}});
  const FileDescriptor other(path_ + ".lock", O_RDWR);
  ASSERT_EQ(flock(other.get(), LOCK_EX), 0);
  EXPECT_THROW(merge_into_tuner_file(path_, {{"b", times(2)}}), IoError);
  testing::internal::CaptureStderr();
  for (int i = 0; i < 1000; ++i) keep_in_tuner_file(path_, {{"b", times(2)}});
  const std::string note = testing::internal::GetCapturedStderr();
  EXPECT_EQ(std::count(note.begin(), note.end(), '\n'), 1) << note;
  EXPECT_THAT(note,
              HasSubstr("tuner.json.lock: another process has held it for 0.5 s: what this run"
                        " measures is not kept"));
  // Reading, even of a damaged file, takes no lock.
  EXPECT_EQ(read_tuner_file(path_), (Json{{"a", times(1)}}));
  const std::string whole = read_file(path_);
  write_file(path_, whole.substr(0, whole.size() - 2));
  for (int i = 0; i < 1000; ++i) EXPECT_EQ(read_tuner_file(path_), (Json{{"a", times(1)}}));
}

TEST_F(TunerFile, LockIsNotFollowedToAnotherFile) {
  const std::string elsewhere = (folder_ / "elsewhere").string();
  fs::create_symlink(elsewhere, path_ + ".lock");
  EXPECT_THROW(merge_into_tuner_file(path_, {{"a", times(1)}}), IoError);
  EXPECT_FALSE(fs::exists(elsewhere));
}

// Quadratic time would be minutes.
TEST_F(TunerFile, LargeDamagedFileIsReadInLinearTime) {
  Json many;
  for (int i = 0; i < 1000; ++i) many["key " + std::to_string(i)] = times(i);
  merge_into_tuner_file(path_, many);
  std::string text = read_file(path_);
  text.resize(text.size() - 3);  // the last brace
  for (const char* junk : {"{", "\"", "\n \"a\": {\"b\": ", "\n \"a\": {\"b"}) {
    std::string damaged = text;
    while (damaged.size() < (size_t(4) << 20) - 100) damaged += junk;
    write_file(path_, damaged);
    Json entries;
    EXPECT_THAT(said(entries), HasSubstr("damaged: 1000 whole entries kept"));
    EXPECT_EQ(entries, many);
  }
}

TEST_F(TunerFile, TooLargeFileIsMovedAside) {
  write_file(path_, "");
  fs::resize_file(path_, uintmax_t(1) << 40);  // sparse
  Json entries;
  EXPECT_THAT(said(entries), HasSubstr("1099511627776 bytes, more than 4 MiB: 0 whole entries"));
  fs::remove(path_ + ".damaged");
  merge_into_tuner_file(path_, {{"a", times(1)}});
  EXPECT_EQ(read_tuner_file(path_), (Json{{"a", times(1)}}));
}

TEST_F(TunerFile, OldestEntriesAreDroppedIfTooLarge) {
  Json many;
  for (int i = 0; i < 1000; ++i) {
    Json entry = times(i);
    entry["time"] = i;
    many[std::to_string(i) + std::string(5000, 'x')] = entry;
  }
  many["choice"] = {{"choice", "text"}};
  merge_into_tuner_file(path_, many);
  EXPECT_LE(fs::file_size(path_), size_t(4) << 20);
  const Json remaining = read_tuner_file(path_);
  EXPECT_GE(remaining.size(), 400u);
  EXPECT_TRUE(remaining.contains("999" + std::string(5000, 'x')));
  EXPECT_TRUE(remaining.contains("choice"));
  EXPECT_FALSE(remaining.contains("0" + std::string(5000, 'x')));
}

}  // namespace
}  // namespace tandem::test
