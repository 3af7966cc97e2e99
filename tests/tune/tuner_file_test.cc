// The tuner's file among many writers, and when it is damaged.
#include "tune/tuner_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/files.h"
#include "core/version.h"

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
  // What reading says, on standard error.
  std::string said(Json& entries) const {
    testing::internal::CaptureStderr();
    entries = read_tuner_file(path_);
    return testing::internal::GetCapturedStderr();
  }

  fs::path folder_;
  std::string path_;
};

TEST_F(TunerFile, KeepsWhatEveryWriterAdds) {
  constexpr int kWriters = 8, kEach = 12;
  std::vector<pid_t> writers;
  for (int writer = 0; writer < kWriters; ++writer) {
    const pid_t child = fork();
    if (child == 0) {
      int status = 0;
      try {
        for (int i = 0; i < kEach; ++i) {
          const std::string key = std::to_string(writer) + " " + std::to_string(i);
          merge_into_tuner_file(path_, {{key, times(i)}});
          // All add to this one.
          merge_into_tuner_file(path_, {{"all", {{"measured_us", {{key, 1.5}}}}}});
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

// Processes of two hosts, or of two containers, may have the same number.
TEST_F(TunerFile, NeedsNoNameThatAProcessOfTheSameNumberHas) {
  fs::create_directory(path_ + "." + std::to_string(getpid()));
  merge_into_tuner_file(path_, {{"a", times(1)}});
  EXPECT_EQ(read_tuner_file(path_).at("a"), times(1));
}

TEST_F(TunerFile, ThatIsCutOffKeepsWholeEntries) {
  const std::vector<std::string> keys{"a | b \"{c}\" \\", "d", "e"};
  for (size_t i = 0; i < keys.size(); ++i)
    merge_into_tuner_file(path_, {{keys[i], times(double(i))}});
  const std::string whole = read_file(path_);
  std::vector<size_t> ends;  // of the entries, in the text
  for (size_t i = 0; i < keys.size(); ++i) {
    ends.push_back(whole.find("}\n }", i == 0 ? 0 : ends.back()) + 4);
  }
  const size_t version_end = whole.find(kVersion) + std::string(kVersion).size() + 1;
  for (size_t size = 0; size + 2 < whole.size(); ++size) {
    const std::string cut = whole.substr(0, size);
    write_file(path_, cut);
    fs::remove(path_ + ".damaged");
    Json entries;
    const std::string line = said(entries);
    const size_t kept =
        size < version_end ? 0 : size_t(std::count_if(ends.begin(), ends.end(), [&](size_t end) {
          return end <= size;
        }));
    ASSERT_EQ(entries.size(), kept) << cut;
    for (size_t i = 0; i < kept; ++i) EXPECT_EQ(entries.at(keys[i]), times(double(i))) << cut;
    EXPECT_EQ(std::count(line.begin(), line.end(), '\n'), 1) << line;
    EXPECT_THAT(line, HasSubstr(path_ + ": damaged: " + std::to_string(kept) + " whole entr"));
    EXPECT_EQ(read_file(path_ + ".damaged"), cut);
    // It has been repaired: nothing more is said of it.
    EXPECT_EQ(said(entries), "");
    EXPECT_EQ(entries.size(), kept);
  }
}

TEST_F(TunerFile, LosesOnlyTheEntryThatIsDamaged) {
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
    EXPECT_FALSE(entries.contains("b")) << damage;
    EXPECT_EQ(read_file(path_ + ".damaged"), text);
  }
  // In good JSON: times that are none.
  write_file(path_, Json{{"tandem", kVersion}, {"a", times(1)}, {"b", 7}}.dump());
  Json entries;
  EXPECT_THAT(said(entries), HasSubstr("1 whole entry kept"));
  EXPECT_EQ(entries, (Json{{"a", times(1)}}));
}

TEST_F(TunerFile, OfAnotherReleaseSaysNothing) {
  write_file(path_, Json{{"tandem", "0.0.1"}, {"a", times(1)}}.dump());
  EXPECT_TRUE(read_tuner_file(path_).empty());
  EXPECT_TRUE(salvaged_entries("{\"tandem\": \"0.0.1\", \"a\": {\"measured_us\": {}}").empty());
  merge_into_tuner_file(path_, {{"b", times(2)}});
  EXPECT_EQ(read_tuner_file(path_), (Json{{"b", times(2)}}));
}

TEST_F(TunerFile, ThatCannotBeRepairedStillSaysWhatItCan) {
  merge_into_tuner_file(path_, {{"a", times(1)}, {"b", times(2)}});
  const std::string whole = read_file(path_);
  write_file(path_, whole.substr(0, whole.size() - 5));
  fs::remove(path_ + ".lock");
  fs::create_directory(path_ + ".lock");  // which nobody can open as a file
  Json entries;
  EXPECT_THAT(said(entries), HasSubstr("damaged, not repaired"));
  EXPECT_EQ(entries, (Json{{"a", times(1)}}));
}

}  // namespace
}  // namespace tandem::test
