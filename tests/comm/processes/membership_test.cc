// Membership board of `tandem launch`, and the watch for hanging ranks, with forked processes as
// ranks.
#include "comm/rendezvous/membership.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "comm/rendezvous/hang_watch.h"

namespace tandem::control {
namespace {

using namespace std::chrono_literals;
using testing::HasSubstr;
using testing::StartsWith;
using Clock = std::chrono::steady_clock;

constexpr int kEnded = 100, kLate = 101;

pid_t fork_process(const std::function<int()>& body) {
  const pid_t pid = fork();
  if (pid == 0) _exit(body());
  return pid;
}

int exit_code(pid_t pid) {
  int status = 0;
  waitpid(pid, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

/// In a new process: its rank after the join, 10 times the size more.
int join(const Board& board, int slot, Clock::duration patience) {
  setenv(kMembershipVariable, Member::describe(board, slot).c_str(), 1);
  Member* const member = Member::of_environment();
  switch (member->join(Clock::now() + patience)) {
    case Member::Joined::yes:
      return std::atoi(std::getenv("RANK")) + 10 * std::atoi(std::getenv("WORLD_SIZE"));
    case Member::Joined::ended:
      return kEnded;
    case Member::Joined::late:
      return kLate;
  }
  return -1;
}

void begin(Board& board, int size) {
  board.head().size = size;
  ++board.head().generation;
  board.notify_change();
}

TEST(Membership, SparesWaitUntilTheyHaveARank) {
  Board board(2, "run");
  board.reset_slot(0, 0);
  board.reset_slot(1, kSpare);
  begin(board, 1);
  EXPECT_EQ(exit_code(fork_process([&] { return join(board, 0, 10s); })), 10);
  const pid_t spare = fork_process([&] { return join(board, 1, 1ms); });
  std::this_thread::sleep_for(50ms);
  board.slot(1).rank = 2;
  begin(board, 3);
  EXPECT_EQ(exit_code(spare), 32);
}

TEST(Membership, JoinsEndWithTheRunOrAtTheirTime) {
  Board board(1, "run");
  board.reset_slot(0, kSpare);
  begin(board, 1);
  const pid_t spare = fork_process([&] { return join(board, 0, 1ms); });
  std::this_thread::sleep_for(50ms);
  board.head().closed = kClosed;
  board.notify_change();
  EXPECT_EQ(exit_code(spare), kEnded);
  Board without_generation(1, "run");
  without_generation.reset_slot(0, 0);
  EXPECT_EQ(exit_code(fork_process([&] { return join(without_generation, 0, 10ms); })), kLate);
}

TEST(Membership, AGenerationEndsTheWorldBeforeIt) {
  Board board(1, "run");
  board.reset_slot(0, 0);
  begin(board, 1);
  const pid_t rank = fork_process([&] {
    join(board, 0, 10s);
    if (Member::of_environment()->is_outdated()) return 1;
    begin(board, 1);
    return Member::of_environment()->is_outdated() ? 0 : 2;
  });
  EXPECT_EQ(exit_code(rank), 0);
}

/// A forked rank on a board of its own, watched for a time.
class WatchedRank {
 public:
  WatchedRank(const std::function<void()>& body, double step_timeout_s, bool trains = true)
      : board_(1, "run"), watch_(board_, step_timeout_s) {
    board_.reset_slot(0, 0);
    board_.head().generation = 1;
    if (trains) board_.slot(0).training = 1;
    pid_ = fork_process([&] {
      progress_words = &board_.slot(0).words;
      body();
      return 0;
    });
  }
  ~WatchedRank() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  WatchedRank(const WatchedRank&) = delete;
  WatchedRank& operator=(const WatchedRank&) = delete;

  void check() {
    if (!cause_.empty()) return;
    cause_ = watch_.check(0, pid_);
    if (!cause_.empty()) kill(pid_, SIGKILL);  // leaves the processor to the others
  }
  const std::string& cause() const { return cause_; }

 private:
  Board board_;
  HangWatch watch_;
  pid_t pid_ = -1;
  std::string cause_;
};

[[noreturn]] void compute() {
  for (volatile bool computes = true; computes;) {
  }
  _exit(1);
}

void begin_now(RankActivity activity) {
  begin_activity(activity, "ag_gemm", Clock::now(), 1);
}

TEST(HangWatch, TellsHangsFromWaitsAndLongWork) {
  using Activity = RankActivity;
  struct Case {
    std::function<void()> body;
    std::string cause;
    double step_timeout_s = 0;
    bool trains = true;
  };
  const auto stopped_in = [](Activity activity) {
    return [activity] {
      begin_now(activity);
      raise(SIGSTOP);
    };
  };
  const auto sleeping_in = [](Activity activity) {
    return [activity] {
      begin_now(activity);
      std::this_thread::sleep_for(60s);
    };
  };
  // A whole step, then one of that size, or another scope, that computes and does not end.
  const auto second = [](const char* scope, int64_t size, const char* name,
                         std::chrono::milliseconds of_first = 0ms) {
    return [=] {
      {
        const WorkScope step("step", 8);
        begin_now(Activity::work);
        std::this_thread::sleep_for(of_first);
        begin_now(Activity::wait);
      }
      const WorkScope next(scope, size);
      begin_activity(Activity::work, name, Clock::now());
      compute();
    };
  };
  const auto first = [] {
    const WorkScope step("step", 8);
    begin_now(Activity::work);
    begin_now(Activity::work);  // of the same step, which has not ended
    compute();
  };
  const std::vector<Case> cases{
      {stopped_in(Activity::work), "was stopped (SIGSTOP)"},
      {stopped_in(Activity::wait), "was stopped (SIGSTOP)"},
      {stopped_in(Activity::file), "was stopped (SIGSTOP)"},
      {second("step", 8, "ag_gemm"), "made no progress"},
      {second("step", 8, "ag_gemm"), "", 0, false},
      {second("step", 8, "ag_gemm", 1500ms), ""},  // longer work is expected
      {second("step", 8, "norm"), ""},
      {second("step", 16, "ag_gemm"), ""},
      {second("validation", 8, "ag_gemm"), ""},
      {second("step", 16, "ag_gemm"), "made no progress", 1},
      {first, ""},
      {first, "made no progress", 1},
      {[] {
         while (true) {
           begin_now(Activity::work);
           std::this_thread::sleep_for(20ms);
         }
       },
       ""},
      {sleeping_in(Activity::work), ""},
      {sleeping_in(Activity::wait), "", 1},
      {sleeping_in(Activity::file), ""},
      {sleeping_in(Activity::file), "made no progress", 1},
  };
  std::vector<std::unique_ptr<WatchedRank>> ranks;
  for (const Case& one : cases) {
    ranks.push_back(std::make_unique<WatchedRank>(one.body, one.step_timeout_s, one.trains));
  }
  const auto until = Clock::now() + 60s;
  const auto hung = [&](size_t i) { return cases[i].cause.empty() || !ranks[i]->cause().empty(); };
  const auto all_hung = [&] {
    for (size_t i = 0; i < ranks.size(); ++i) {
      if (!hung(i)) return false;
    }
    return true;
  };
  const auto earliest_end = Clock::now() + 3s;  // the others must not be called hung
  while (Clock::now() < earliest_end || (!all_hung() && Clock::now() < until)) {
    for (const auto& rank : ranks) rank->check();
    std::this_thread::sleep_for(20ms);
  }
  for (size_t i = 0; i < ranks.size(); ++i) {
    EXPECT_EQ(ranks[i]->cause().empty(), cases[i].cause.empty()) << i << ": " << ranks[i]->cause();
    EXPECT_THAT(ranks[i]->cause(), StartsWith(cases[i].cause)) << i;
    if (cases[i].cause.empty()) continue;
    EXPECT_THAT(ranks[i]->cause(), HasSubstr(" s in ag_gemm")) << i;
  }
}

}  // namespace
}  // namespace tandem::control
