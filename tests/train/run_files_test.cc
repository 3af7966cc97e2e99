// Files of a run besides its checkpoints: lock, metrics, final model.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <optional>

#include "core/files.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/run_lock.h"
#include "engine/train/metrics_log.h"
#include "tandem/error.h"
#include "temp_dir.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

std::string line_of(int64_t step) {
  StepRecord metrics;
  metrics.step = step;
  return to_json_line(metrics);
}

TEST(RunLock, RemovedFolderIsCreatedAgain) {
  const TempDir dir;
  const std::string out = dir / "out";
  fs::create_directories(out);
  RunLock lock(out);
  EXPECT_FALSE(lock.renew());
  fs::remove(out + "/.lock");  // by hand
  EXPECT_FALSE(lock.renew());
  EXPECT_TRUE(path_exists(out + "/.lock"));
  fs::remove_all(out);
  EXPECT_TRUE(lock.renew());
  EXPECT_FALSE(lock.renew());
  EXPECT_THROW(RunLock{out}, ConfigError);
}

/// A child process that has the lock and is killed; its file stays open in a process that it has
/// started for another 3 s.
pid_t kill_holder(const std::string& out) {
  int locked[2];
  EXPECT_EQ(::pipe(locked), 0);
  const pid_t holder = ::fork();
  if (holder == 0) {
    const RunLock lock(out);
    if (::fork() == 0) {
      ::close(locked[0]);
      ::close(locked[1]);
      ::sleep(3);
      ::_exit(0);
    }
    if (::write(locked[1], "", 1) == 1) ::pause();
    ::_exit(0);
  }
  char byte = 0;
  EXPECT_EQ(::read(locked[0], &byte, 1), 1);
  ::close(locked[0]);
  ::close(locked[1]);
  ::kill(holder, SIGKILL);
  return holder;
}

TEST(RunLock, WaitsForAHolderThatIsEnding) {
  const TempDir dir;
  const pid_t holder = kill_holder(dir.path());
  { const RunLock lock(dir.path()); }
  ::waitpid(holder, nullptr, 0);
  const RunLock lock(dir.path());
  EXPECT_THROW(RunLock(dir.path(), 0), ConfigError);  // of this process, which is not ending
}

TEST(RunLock, FolderTakenByAnotherRunIsNotTouched) {
  const TempDir dir;
  const std::string out = dir / "out";
  fs::create_directories(out);
  std::optional<RunLock> first(out), second;
  fs::remove_all(out);
  fs::create_directories(out);
  second.emplace(out);
  EXPECT_THROW(first->renew(), ConfigError);
  first.reset();
  EXPECT_TRUE(path_exists(out + "/.lock"));  // the second run's

  second.reset();
  first.emplace(out);
  fs::remove_all(out);
  fs::create_directories(out + "/checkpoints");  // of a run that has ended
  try {
    first->renew();
    ADD_FAILURE() << "renewed";
  } catch (const IoError& error) {
    EXPECT_THAT(error.what(), HasSubstr("holds another run's now (checkpoints)"));
  }
}

TEST(RunLock, IsNotWrittenThroughALink) {
  const TempDir dir;
  write_bytes(dir / "mine", "text");
  fs::create_symlink(dir / "mine", dir / ".lock");
  EXPECT_THROW(RunLock{dir.path()}, IoError);
  EXPECT_EQ(read_file(dir / "mine"), "text");
}

TEST(DirectoryWriter, KeepsTheOldDirectoryUntilComplete) {
  const TempDir dir;
  const auto fill = [&](const std::string& text, bool complete) {
    DirectoryWriter writer(dir.path(), "final");
    write_file(DirectoryWriter::temporary_folder(dir.path(), "final") + "/f", text);
    if (complete) writer.commit();
  };
  fill("one", true);
  fill("half", false);
  EXPECT_EQ(read_file(dir / "final/f"), "one");
  EXPECT_FALSE(path_exists(DirectoryWriter::temporary_folder(dir.path(), "final")));
  fill("two", true);
  EXPECT_EQ(read_file(dir / "final/f"), "two");
}

TEST(DirectoryWriter, KeepsFilesOfTheUser) {
  const TempDir dir;
  fs::create_directories(dir / "final/notes");
  write_bytes(dir / "final/f", "old");
  write_bytes(dir / "final/tokenizer.json", "mine");
  write_bytes(dir / "final/notes/a", "too");
  fs::create_symlink("nowhere", dir / "final/link");
  const auto save = [&](const std::string& text) {
    DirectoryWriter writer(dir.path(), "final");
    write_file(DirectoryWriter::temporary_folder(dir.path(), "final") + "/f", text);
    writer.commit();
  };
  save("new");
  EXPECT_EQ(read_file(dir / "final/f"), "new");
  EXPECT_EQ(read_file(dir / "final/tokenizer.json"), "mine");
  EXPECT_EQ(read_file(dir / "final/notes/a"), "too");
  EXPECT_TRUE(fs::is_symlink(dir / "final/link"));
  ASSERT_EQ(::mkfifo((dir / "final/pipe").c_str(), 0600), 0);  // cannot be copied
  save("newer");
  EXPECT_EQ(read_file(dir / "final/f"), "newer");
  EXPECT_EQ(read_file(dir / "final.replaced/tokenizer.json"), "mine");
  fs::remove_all(dir / "final");
  fs::create_symlink(dir / "final.replaced", dir / "final");
  save("newest");
  EXPECT_EQ(read_file(dir / "final/f"), "newest");
  EXPECT_EQ(read_file(dir / "final.replaced/f"), "new");
}

TEST(MetricsLog, ResumeDropsLaterAndBrokenLines) {
  const TempDir dir;
  const std::string path = dir / "metrics.jsonl";
  StepRecord m;
  {
    MetricsLog log(path, 0);
    for (m.step = 1; m.step <= 5; ++m.step) log.add(m);
  }
  const std::string whole = read_file(path);
  write_bytes(path, whole.substr(0, whole.size() - 3));  // killed while writing
  { MetricsLog log(path, 100); }
  EXPECT_EQ(std::count_if(whole.begin(), whole.end(), [](char c) { return c == '\n'; }), 5);
  std::string content = read_file(path);
  EXPECT_EQ(std::count(content.begin(), content.end(), '\n'), 4);
  {
    MetricsLog log(path, 2);
    m.step = 3;
    log.add(m);
  }
  content = read_file(path);
  EXPECT_EQ(std::count(content.begin(), content.end(), '\n'), 3);
  EXPECT_THAT(content, ::testing::EndsWith(to_json_line(m)));
}

TEST(MetricsLog, DamagedLineIsMovedAsideAndTheRestKept) {
  const TempDir dir;
  const std::string path = dir / "metrics.jsonl";
  std::string text, good;
  StepRecord m;
  for (m.step = 1; m.step <= 100; ++m.step) {
    const std::string line = to_json_line(m);
    text += m.step == 40 ? "{\"step\": 4#\n" : m.step == 60 ? std::string(30, '\0') + "\n" : line;
    if (m.step != 40 && m.step != 60 && m.step <= 90) good += line;
  }
  write_bytes(path, text);
  { MetricsLog log(path, 90); }
  EXPECT_EQ(read_file(path), good);
  EXPECT_EQ(read_file(path + ".damaged"), "{\"step\": 4#\n" + std::string(30, '\0') + "\n");
}

// The step is saved, so a resumed run would never write its line.
TEST(MetricsLog, LineThatCouldNotBeWrittenIsWrittenBySync) {
  const TempDir dir;
  const std::string path = dir / "metrics.jsonl";
  MetricsLog log(path, 0);
  StepRecord metrics;
  metrics.step = 1;
  log.add(metrics);
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit full{line_of(1).size() + 10, before.rlim_max};  // ten bytes of the next line fit
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &full), 0);
  metrics.step = 2;
  EXPECT_THROW(log.add(metrics), IoError);
  EXPECT_THROW(log.sync(), IoError);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  std::signal(SIGXFSZ, handler);
  log.sync();
  EXPECT_EQ(read_file(path), line_of(1) + line_of(2));
}

TEST(MetricsLog, IsNotWrittenThroughALink) {
  const TempDir dir;
  const std::string path = dir / "metrics.jsonl", first = line_of(1);
  write_bytes(dir / "mine", first);
  fs::create_symlink(dir / "mine", path);
  StepRecord second;
  second.step = 2;
  { MetricsLog(path, 1).add(second); }
  EXPECT_EQ(read_file(dir / "mine"), first);
  EXPECT_EQ(read_file(path), first + line_of(2));
  fs::remove(path);
  fs::create_symlink("nowhere", path);
  { MetricsLog log(path, 1); }
  EXPECT_EQ(read_file(path), "");
  EXPECT_FALSE(path_exists(dir / "nowhere"));
}

}  // namespace
}  // namespace tandem
