#include "core/system/blocked_signals.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <optional>
#include <thread>

namespace tandem {
namespace {

/// Blocks or unblocks SIGTERM in this thread; returns the set of it.
sigset_t set_mask(int how) {
  sigset_t term;
  sigemptyset(&term);
  sigaddset(&term, SIGTERM);
  pthread_sigmask(how, &term, nullptr);
  return term;
}

/// Status of a process that waits for SIGTERM while a thread, started before, does not.
int end_by_signal(bool blocks) {
  const pid_t child = fork();
  if (child == 0) {
    std::signal(SIGTERM, SIG_DFL);
    set_mask(SIG_UNBLOCK);  // whatever the test was started with
    std::atomic<bool> runs = false;
    {
      std::optional<BlockedSignals> blocked;
      if (blocks) blocked.emplace();
      std::thread([&runs] {
        runs = true;
        std::this_thread::sleep_for(std::chrono::minutes(1));
      }).detach();
    }
    while (!runs) std::this_thread::yield();
    const sigset_t term = set_mask(SIG_BLOCK);
    kill(getpid(), SIGTERM);
    const timespec patience{30, 0};
    _exit(sigtimedwait(&term, nullptr, &patience) == SIGTERM ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return status;
}

TEST(BlockedSignals, ComeToTheThreadThatWaits) {
  const int status = end_by_signal(true);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST(BlockedSignals, OthersEndTheProcess) {
  const int status = end_by_signal(false);
  EXPECT_TRUE(WIFSIGNALED(status));
  EXPECT_EQ(WTERMSIG(status), SIGTERM);
}

TEST(BlockedSignals, AreThoseOfBeforeAfterwards) {
  sigset_t before, after;
  pthread_sigmask(SIG_BLOCK, nullptr, &before);
  { const BlockedSignals blocked; }
  pthread_sigmask(SIG_BLOCK, nullptr, &after);
  EXPECT_EQ(sigismember(&after, SIGTERM), sigismember(&before, SIGTERM));
  EXPECT_EQ(sigismember(&after, SIGINT), sigismember(&before, SIGINT));
}

}  // namespace
}  // namespace tandem
