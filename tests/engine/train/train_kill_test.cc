// kill -9 at any moment, then --resume: the final weights equal those of an uninterrupted run, and
// the ledger shows every sample once.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <thread>

#include "core/system/files.h"
#include "tandem/random.h"
#include "temp_dir.h"
#include "tests/engine/data/data_check.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

/// `every`: checkpoint.every. `dp`: of 4 logical replicas; 0: two tensor-parallel ranks of one.
pid_t start(const std::string& out, int every, int dp) {
  const pid_t child = ::fork();
  if (child != 0) return child;
  const int null = ::open("/dev/null", O_WRONLY);
  ::dup2(null, STDERR_FILENO);
  ::execl(TANDEM_CLI, "tandem", "train", TANDEM_SOURCE_DIR "/configs/tiny.toml", "--out",
          out.c_str(), "--resume", dp == 0 ? "--tp" : "--dp",
          std::to_string(dp == 0 ? 2 : dp).c_str(), "--set",
          dp == 0 ? "parallel.replicas=0" : "parallel.replicas=4", "--set",
          dp == 0 ? "train.batch=2" : "train.batch=4", "--set", "train.steps=30", "--set",
          ("checkpoint.every=" + std::to_string(every)).c_str(), "--set", "model.hidden=16",
          "--set", "model.layers=1", "--set", "model.head_dim=4", "--set", "model.ffn=32", "--set",
          "train.seq=16", static_cast<char*>(nullptr));
  ::_exit(127);
}

/// Exit status of a run that has ended, or -1 if it was killed.
int finish(pid_t child) {
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

bool running(pid_t child) {
  siginfo_t info{};
  ::waitid(P_PID, id_t(child), &info, WEXITED | WNOHANG | WNOWAIT);
  return info.si_pid == 0;
}

/// Number of files of a save in progress, -1 if none.
int unfinished_files(const std::string& out) {
  std::error_code code;
  for (const auto& entry : fs::directory_iterator(out + "/checkpoints", code)) {
    if (!entry.path().filename().string().starts_with(".tmp-")) continue;
    int files = 0;
    for (fs::directory_iterator at(entry.path(), code), end; !code && at != end;
         at.increment(code)) {
      ++files;
    }
    return files;
  }
  return -1;
}

/// Even kills: after a random time. Odd ones: when a save has begun and written some files.
void wait_for_moment(pid_t child, const std::string& out, int kill, double run_s) {
  const auto words = philox(77, 0, uint64_t(kill));
  const auto begin = Clock::now();
  const double delay = run_s * 0.6 * double(words[0]) * 0x1p-32;
  while (running(child)) {
    const double elapsed = std::chrono::duration<double>(Clock::now() - begin).count();
    if (kill % 2 == 0 && elapsed > delay) return;
    if (kill % 2 == 1 && elapsed > delay / 4 && unfinished_files(out) >= int(words[1] % 4)) return;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

/// With checkpoints every 3 steps, and after every step, when a snapshot is taken or a checkpoint
/// written at any moment. `changes_ranks`: at every kill. The time within which kills fall is that
/// of a whole run, and less after each run that ended before its kill.
void kill_and_resume(int wanted, bool changes_ranks = false) {
  const TempDir dir;
  ::setenv("TANDEM_CACHE_DIR", (dir / "cache").c_str(), 1);
  ::setenv("TANDEM_THREADS", "1", 1);
  const auto begin = Clock::now();
  const auto ranks = [=](int attempt) { return changes_ranks ? 1 + (attempt + 3) % 4 : 0; };
  ASSERT_EQ(finish(start(dir / "whole", 3, ranks(0))), 0);
  double run_s = std::chrono::duration<double>(Clock::now() - begin).count();
  const std::string expected = read_file(dir / "whole/final/model.safetensors");

  int kills = 0, in_save = 0, runs = 0;
  for (int attempt = 0; kills < wanted && attempt < 10 * wanted; ++attempt, ++runs) {
    const int every = runs % 2 == 0 ? 1 : 3;
    const std::string out = dir / ("run" + std::to_string(runs));
    for (int chain = 0; chain < 5; ++chain, ++attempt) {
      const pid_t child = start(out, every, ranks(attempt));
      wait_for_moment(child, out, attempt, run_s);
      ::kill(child, SIGKILL);
      if (finish(child) >= 0) {  // it had finished before
        run_s *= 0.9;
        break;
      }
      ++kills;
      in_save += unfinished_files(out) >= 0;
    }
    ASSERT_EQ(finish(start(out, every, ranks(attempt))), 0);
    ASSERT_EQ(read_file(out + "/final/model.safetensors"), expected) << "run " << runs;
    ASSERT_EQ(unfinished_files(out), -1);
    const std::string metrics = read_file(out + "/metrics.jsonl");
    ASSERT_EQ(std::count(metrics.begin(), metrics.end(), '\n'), 30);
    ASSERT_EQ(check_data(TANDEM_CLI, out), 0) << "run " << runs;
  }
  EXPECT_GE(kills, wanted * 5 / 6);
  EXPECT_GE(in_save, wanted / 6);
  testing::Test::RecordProperty("kills", kills);
  testing::Test::RecordProperty("kills_inside_a_save", in_save);
}

TEST(TrainKill, ResumedRunEndsWithTheSameBits) {
  kill_and_resume(24);
}

TEST(TrainKill, RanksOfTheSameReplicasEndWithTheSameBits) {
  kill_and_resume(8, true);
}

TEST(TrainKillLong, RanksOfTheSameReplicasEndWithTheSameBits) {
  kill_and_resume(200, true);
}

TEST(TrainKillLong, ResumedRunEndsWithTheSameBits) {
  kill_and_resume(1000);
}

}  // namespace
}  // namespace tandem
