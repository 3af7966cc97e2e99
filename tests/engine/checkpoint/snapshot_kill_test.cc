// kill -9 of a launcher and all ranks at any moment, while the memory of their snapshots stays: the
// run resumes from it, and its final weights equal those of an undisturbed run.
#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "comm/processes/shared/snapshot_memory_file.h"
#include "core/system/files.h"
#include "tandem/random.h"
#include "tests/engine/data/data_check.h"
#include "tests/engine/train/temp_dir.h"

namespace tandem {
namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* kPeerCopy = "checkpoint.peer_copy=true";

struct KilledRun {
  std::string config;
  std::vector<std::string> options;  ///< of tandem train
  int processes;                     ///< 0: ranks are threads of one
  bool has_peers() const { return std::ranges::find(options, kPeerCopy) != options.end(); }
};

std::vector<KilledRun> killed_runs() {
  return {
      {"tiny.toml", {"--tp", "2"}, 2},
      {"tiny.toml", {"--dp", "2", "--set", kPeerCopy}, 2},
      {"tiny.toml", {"--tp", "2", "--dp", "2", "--set", kPeerCopy, "--set", "train.dtype=bf16"}, 0},
      {"tiny.toml", {"--pp", "2", "--set", "parallel.zero=0", "--set", "train.microbatch=1"}, 2},
      {"moe.toml", {"--dp", "2", "--ep", "2", "--set", kPeerCopy}, 0}};
}

/// Memory that the test holds, as a launcher or a host's agent does.
int hold_memory() {
  const int fd = processes::create_snapshot_memory();
  ::fcntl(fd, F_SETFD, 0);
  ::setenv(processes::kSnapshotMemoryVariable, std::to_string(fd).c_str(), 1);
  return fd;
}

pid_t start(const KilledRun& run, const std::string& out, const std::string& log, int every) {
  std::vector<std::string> words{"tandem"};
  if (run.processes > 0) {
    words.insert(words.end(), {"launch", "-n", std::to_string(run.processes), "--", TANDEM_CLI});
  }
  words.insert(words.end(),
               {"train", TANDEM_SOURCE_DIR "/configs/" + run.config, "--out", out, "--resume"});
  words.insert(words.end(), run.options.begin(), run.options.end());
  for (const std::string& key :
       {std::string("train.steps=30"), std::string("train.batch=4"), std::string("train.seq=16"),
        std::string("model.hidden=16"), std::string("model.layers=2"),
        std::string("model.head_dim=4"), std::string("model.ffn=32"),
        std::string("checkpoint.snapshot_every=1"), fmt::format("checkpoint.every={}", every)}) {
    words.insert(words.end(), {"--set", key});
  }
  const pid_t child = ::fork();
  if (child != 0) return child;
  const int file = ::open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
  ::dup2(file, STDOUT_FILENO);
  ::dup2(file, STDERR_FILENO);
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  ::execv(TANDEM_CLI, arguments.data());
  ::_exit(127);
}

/// Exit status, or -1 if it was killed. Also waits for the ranks of a launcher, which die with it.
int finish(pid_t child) {
  int status = 0, of_child = 0;
  for (pid_t pid; (pid = ::waitpid(-1, &status, 0)) > 0;) {
    if (pid == child) of_child = status;
  }
  return WIFEXITED(of_child) ? WEXITSTATUS(of_child) : -1;
}

int64_t count_lines(const std::string& path) {
  if (!path_exists(path)) return 0;
  const std::string text = read_file(path);
  return std::count(text.begin(), text.end(), '\n');
}

/// Checkpoints on disk at every 10th step, or none before the end.
void kill_and_restore(int wanted) {
  const TempDir dir;
  ::setenv("TANDEM_CACHE_DIR", (dir / "cache").c_str(), 1);
  ::setenv("TANDEM_THREADS", "1", 1);
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  int kills = 0, restored = 0, max_lost = 0, max_lost_with_peers = 0;
  for (int number = 0; kills < wanted; ++number) {
    const KilledRun run = killed_runs()[size_t(number) % killed_runs().size()];
    const int fd = hold_memory();
    const std::string whole = dir / fmt::format("whole{}", number % int(killed_runs().size()));
    const auto begin = Clock::now();
    if (!path_exists(whole)) {
      ASSERT_EQ(finish(start(run, whole, whole + ".log", 10)), 0);
    }
    const double run_s = std::chrono::duration<double>(Clock::now() - begin).count();
    const std::string out = dir / fmt::format("run{}", number);
    int64_t finished = 0;  // steps; a line is written before the step's snapshot is taken
    for (int chain = 0; chain < 4; ++chain) {
      const std::string log = fmt::format("{}.log{}", out, chain);
      const pid_t child = start(run, out, log, number % 2 == 0 ? 10 : 1000);
      const auto words = philox(7, uint64_t(number), uint64_t(chain));
      // At a step, or after a time, which may be before the first one.
      const int64_t target = count_lines(out + "/metrics.jsonl") + 1 + words[0] % 12;
      const auto end = Clock::now() + std::chrono::duration<double>(
                                          words[1] % 4 == 0 ? run_s * words[2] * 0x1p-32 : 60);
      siginfo_t info{};
      while (Clock::now() < end && count_lines(out + "/metrics.jsonl") < target) {
        ::waitid(P_PID, id_t(child), &info, WEXITED | WNOHANG | WNOWAIT);
        if (info.si_pid != 0) break;
        std::this_thread::sleep_for(std::chrono::microseconds(200 + words[3] % 2000));
      }
      ::kill(child, SIGKILL);
      const bool was_killed = finish(child) < 0;
      const std::string text = path_exists(log) ? read_file(log) : "";
      if (const size_t at = text.find("resuming from step "); at != text.npos) {
        ++restored;
        const int64_t from = std::stoll(text.substr(at + 19));
        // With peers, a snapshot is not taken while all memory is held for slower copies.
        int& lost = run.has_peers() ? max_lost_with_peers : max_lost;
        lost = std::max(lost, int(finished - from));
      }
      finished = count_lines(out + "/metrics.jsonl");
      if (!was_killed) break;
      ++kills;
    }
    const std::string log = out + ".last";
    ASSERT_EQ(finish(start(run, out, log, 10)), 0) << read_file(log);
    ASSERT_TRUE(read_file(out + "/final/model.safetensors") ==
                read_file(whole + "/final/model.safetensors"))
        << "run " << number << "\n"
        << read_file(log);
    ASSERT_EQ(count_lines(out + "/metrics.jsonl"), 30);
    ASSERT_EQ(check_data(TANDEM_CLI, out), 0) << "run " << number;
    ::close(fd);
  }
  EXPECT_GE(restored, kills / 2);
  EXPECT_LE(max_lost, 1);
  testing::Test::RecordProperty("kills", kills);
  testing::Test::RecordProperty("restored", restored);
  testing::Test::RecordProperty("max_lost", max_lost);
  testing::Test::RecordProperty("max_lost_with_peers", max_lost_with_peers);
}

TEST(SnapshotKill, RestoredRunEndsWithTheSameBits) {
  kill_and_restore(18);
}

TEST(SnapshotKillLong, RestoredRunEndsWithTheSameBits) {
  kill_and_restore(1000);
}

}  // namespace
}  // namespace tandem
