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
#include <map>
#include <optional>
#include <vector>

#include "core/formats/safetensors.h"
#include "core/system/files.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/run/disk_room.h"
#include "engine/checkpoint/run/run_lock.h"
#include "engine/train/records/metrics_log.h"
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
  EXPECT_FALSE(first->is_locked());
  try {
    first->renew();
    ADD_FAILURE() << "renewed";
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), HasSubstr("was removed, and holds another run's now (checkpoints)"));
  }
  EXPECT_EQ(names_in(out), std::vector<std::string>{"checkpoints"});
}

TEST(RunLock, LockTakenByAnotherRunIsNotTakenBack) {
  const TempDir dir;
  RunLock first(dir.path());
  EXPECT_NO_THROW(first.check());
  fs::remove(dir / ".lock");  // by hand
  EXPECT_NO_THROW(first.check());
  const RunLock second(dir.path());
  EXPECT_THROW(first.check(), ConfigError);
  EXPECT_THROW(first.renew(), ConfigError);
  EXPECT_TRUE(second.is_locked());
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

/// A folder of `train` that was interrupted between the two renames of a replacement.
TEST(DirectoryWriter, InterruptedReplacementIsFoundAndCompleted) {
  const TempDir dir;
  fs::create_directories(dir / ".was-final");
  write_bytes(dir / ".was-final/f", "old");
  EXPECT_EQ(final_path(dir.path()), dir / ".was-final");
  restore_final(dir.path());
  EXPECT_EQ(final_path(dir.path()), dir / "final");
  EXPECT_EQ(read_file(dir / "final/f"), "old");
  fs::create_directories(dir / ".was-final");  // interrupted before it was removed
  restore_final(dir.path());
  EXPECT_EQ(final_path(dir.path()), dir / "final");
  EXPECT_EQ(read_file(dir / "final/f"), "old");
}

/// Makes OUT/checkpoints/step-N with `bytes` bytes.
void make_checkpoint(const std::string& out, int64_t step, size_t bytes) {
  TrainState state;
  state.step = step;
  ModelConfig model;
  CheckpointWriter checkpoint(out, step);
  std::map<std::string, std::string> hashes;
  for (const char* name : {"model.safetensors", "optimizer.safetensors"}) {
    SafetensorsWriter file(checkpoint.path(name), {{"x", DType::u8, {int64_t(bytes / 2)}}});
    file.write(std::vector<std::byte>(bytes / 2));
    hashes[name] = file.finish();
  }
  checkpoint.complete(state, model, hashes);
  checkpoint.commit();
}

std::vector<std::string> names_of_checkpoints(const std::string& out) {
  return names_in(out + "/checkpoints");
}

TEST(CheckpointKeeper, DropsTheOldestIntactCheckpointsIfThatMakesRoom) {
  constexpr size_t kBytes = 100'000;
  const TempDir dir;
  std::vector<std::string> warnings;
  CheckpointKeeper keeper(dir.path(), 3,
                          [&](const std::string& text) { warnings.push_back(text); });
  for (const int64_t step : {1, 2, 3}) make_checkpoint(dir.path(), step, kBytes);
  const std::vector<std::string> all = names_of_checkpoints(dir.path());
  keeper.make_room(kBytes, 2 * kBytes);
  EXPECT_EQ(names_of_checkpoints(dir.path()), all) << "there is room";
  keeper.make_room(10 * kBytes, kBytes);
  EXPECT_EQ(names_of_checkpoints(dir.path()), all) << "removed in vain";
  EXPECT_TRUE(warnings.empty());
  keeper.make_room(kBytes, 2 * kBytes);
  keeper.make_room(kBytes, kBytes / 2);
  EXPECT_EQ(names_of_checkpoints(dir.path()),
            (std::vector<std::string>{"step-00000002", "step-00000003"}));
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_THAT(warnings[0], HasSubstr("no room for step-00000001 and one more checkpoint"));

  // A damaged one does not count, and is not removed.
  write_bytes(checkpoint_path(dir.path(), 3) + "/config.json", "{}");
  CheckpointKeeper next(dir.path(), 3, [](const std::string&) {});
  next.make_room(kBytes, kBytes / 2);
  EXPECT_EQ(names_of_checkpoints(dir.path()).size(), 2u) << "the only intact one";
}

TEST(CheckpointKeeper, RemovesLeftoversBeforeCheckpoints) {
  constexpr size_t kBytes = 100'000;
  const TempDir dir;
  CheckpointKeeper keeper(dir.path(), 2, [](const std::string&) {});
  for (const int64_t step : {1, 2}) make_checkpoint(dir.path(), step, kBytes);
  fs::create_directories(dir / "checkpoints/.tmp-step-00000009");
  write_bytes(dir / "checkpoints/.tmp-step-00000009/model.safetensors",
              std::string(2 * kBytes, 'x'));
  keeper.make_room(kBytes, 0);
  EXPECT_EQ(names_of_checkpoints(dir.path()),
            (std::vector<std::string>{"step-00000001", "step-00000002"}));
}

TEST(DiskRoom, IsComparedWithWhatTheRunWrites) {
  const auto said = [](uint64_t free, int64_t num_present, DiskNeeds needs) {
    try {
      return check_disk_room("out/checkpoints", free, num_present, needs);
    } catch (const IoError& error) {
      return std::string("error: ") + error.what();
    }
  };
  const DiskNeeds needs{12e9, 4e9, 2, true};
  EXPECT_EQ(said(40'000'000'000, 0, needs), "");
  EXPECT_EQ(said(39'000'000'000, 0, needs),
            "out/checkpoints: 39.0 GB free: expected 40.0 GB, for 3 more checkpoints of 12.0 GB "
            "(checkpoint.keep = 2, and one while it is written) and 4.0 GB of final/");
  EXPECT_EQ(said(16'000'000'000, 2, needs), "");
  EXPECT_EQ(said(16'000'000'000, 7, needs), "");
  EXPECT_EQ(said(16'000'000'000, 0, {12e9, 4e9, 2, false}), "") << "one, at the end";
  EXPECT_EQ(said(11'000'000'000, 2, needs),
            "error: out/checkpoints: 11.0 GB free: expected 16.0 GB, for 1 more checkpoint of "
            "12.0 GB and 4.0 GB of final/; not even one can be saved");
  DiskNeeds recovery = needs;
  recovery.must_fit = false;
  EXPECT_THAT(said(11'000'000'000, 2, recovery), ::testing::StartsWith("out/checkpoints: 11.0 GB"));
}

TEST(DiskRoom, FolderOfCheckpointsIsTried) {
  const TempDir dir;
  const DiskNeeds needs{1, 1, 1, true};
  EXPECT_EQ(check_disk_room(dir.path(), 0, needs), "");
  EXPECT_FALSE(path_exists(dir / "checkpoints"));
  fs::create_symlink("nowhere", dir / "checkpoints");
  EXPECT_THROW(check_disk_room(dir.path(), 0, needs), IoError);
  fs::remove(dir / "checkpoints");
  fs::create_directories(dir / "disk");
  fs::create_symlink("disk", dir / "checkpoints");  // may be another disk
  EXPECT_EQ(check_disk_room(dir.path(), 0, needs), "");
  EXPECT_EQ(names_in(dir / "disk"), std::vector<std::string>{});
}

TEST(MetricsLog, MissingStepsAreNamed) {
  const TempDir dir;
  const std::string path = dir / "metrics.jsonl";
  const auto said = [&](int64_t last_step) {
    testing::internal::CaptureStderr();
    { MetricsLog log(path, last_step); }
    return testing::internal::GetCapturedStderr();
  };
  EXPECT_EQ(said(0), "");
  write_bytes(path, line_of(1) + line_of(2) + line_of(3) + line_of(5));
  EXPECT_EQ(said(3), "");
  write_bytes(path, line_of(1) + line_of(2) + line_of(5));
  EXPECT_THAT(said(5), HasSubstr("no lines of 2 of the 5 steps (the first: step 3)"));
  fs::remove(path);
  EXPECT_THAT(said(4), HasSubstr("no lines of 4 of the 4 steps (the first: step 1)"));
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
