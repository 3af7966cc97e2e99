#include "core/system/blocked_signals.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <optional>
#include <thread>

namespace tandem {
namespace {

/// Status of a process that waits for SIGTERM while a thread, started before, does not.
int end_by_signal(bool holds) {
  const pid_t child = fork();
  if (child == 0) {
    {
      std::optional<BlockedSignals> blocked;
      if (holds) blocked.emplace();
      std::thread([] { std::this_thread::sleep_for(std::chrono::minutes(1)); }).detach();
    }
    sigset_t term;
    sigemptyset(&term);
    sigaddset(&term, SIGTERM);
    pthread_sigmask(SIG_BLOCK, &term, nullptr);
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
