#include "engine/launch/launch_supervisor.h"

#include <fmt/format.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <optional>
#include <set>
#include <thread>

#include "core/system/console.h"
#include "core/system/process/file_limit.h"
#include "engine/launch/processes/local_processes.h"
#include "engine/launch/stop_signals.h"
#include "tandem/error.h"

namespace tandem {
namespace {

using SupervisorClock = std::chrono::steady_clock;

/// Launchers in a row that were killed without a further step, which end the run.
constexpr int kMaxFruitlessLaunchers = 5;
constexpr auto kEndOfRanks = std::chrono::seconds(30);

/// Child processes of this one, among them the orphans of its children.
std::set<pid_t> children() {
  std::ifstream file(fmt::format("/proc/self/task/{}/children", getpid()));
  return {std::istream_iterator<pid_t>(file), std::istream_iterator<pid_t>()};
}

class Supervisor {
 public:
  Supervisor() {
    sigaddset(&watched_, SIGCHLD);
    sigprocmask(SIG_BLOCK, &watched_, &before_);
    prctl(PR_SET_CHILD_SUBREAPER, 1);
  }
  ~Supervisor() { sigprocmask(SIG_SETMASK, &before_, nullptr); }
  Supervisor(const Supervisor&) = delete;
  Supervisor& operator=(const Supervisor&) = delete;

  /// Process id in the parent, 0 in the child, whose signals are as before.
  pid_t fork_launcher() {
    std::fflush(nullptr);
    const pid_t parent = getpid();
    pid_ = fork();
    if (pid_ < 0) throw Unsupported(fmt::format("fork: {}", describe_errno(errno)));
    if (pid_ == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (getppid() != parent) _exit(1);
    }
    return pid_;
  }

  /// Passes signals on until the child ends. Returns its status as waitpid does.
  int await_end() {
    while (true) {
      int status = 0;
      if (waitpid(pid_, &status, WNOHANG) == pid_) return status;
      for (const pid_t orphan : orphans()) waitpid(orphan, nullptr, WNOHANG);
      siginfo_t signal{};
      if (sigwaitinfo(&watched_, &signal) < 0 || signal.si_signo == SIGCHLD) continue;
      is_stopping_ |= signal.si_signo != SIGUSR1 && signal.si_signo != SIGUSR2;
      kill(pid_, signal.si_signo);
    }
  }

  /// Kills what the launcher has left, and waits for its end.
  void end_orphans() const {
    const auto until = SupervisorClock::now() + kEndOfRanks;
    while (SupervisorClock::now() < until) {
      const std::set<pid_t> left = orphans();
      if (left.empty()) return;
      for (const pid_t orphan : left) {
        kill(-orphan, SIGKILL);  // a rank's group: the processes that its command has started
        kill(orphan, SIGKILL);
        waitpid(orphan, nullptr, WNOHANG);
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    throw Error(fmt::format("launch: ranks of the last launcher did not end within {} s",
                            kEndOfRanks.count()));
  }
  bool is_stopping() const { return is_stopping_; }

 private:
  /// Processes that the launcher has started: not those that this process had before.
  std::set<pid_t> orphans() const {
    std::set<pid_t> found = children();
    found.erase(pid_);
    for (const pid_t other : others_) found.erase(other);
    return found;
  }

  const std::set<pid_t> others_ = children();
  sigset_t watched_ = watched_signals(), before_{};
  pid_t pid_ = 0;
  bool is_stopping_ = false;
};

}  // namespace

int supervise(const std::function<int(const LostLauncher*)>& launch,
              const std::function<int64_t()>& progress) {
  std::optional<LostLauncher> lost;
  std::optional<Supervisor> supervisor(std::in_place);
  int fruitless = 0, given_up = 0;  // given_up: exit status
  for (int64_t steps = -1;;) {
    const pid_t pid = supervisor->fork_launcher();
    if (pid == 0) {
      supervisor.reset();
      return launch(lost ? &*lost : nullptr);
    }
    const int status = supervisor->await_end();
    if (!WIFSIGNALED(status)) return given_up ? given_up : WEXITSTATUS(status);
    if (WTERMSIG(status) == SIGPIPE) return 128 + SIGPIPE;  // the reader of its output has ended
    supervisor->end_orphans();
    if (given_up) return given_up;
    lost = {pid, describe_end(status), SupervisorClock::now()};
    const int64_t steps_now = progress();
    fruitless = steps_now > steps ? 0 : fruitless + 1;
    steps = std::max(steps, steps_now);
    lost->is_last = fruitless == kMaxFruitlessLaunchers;
    if (!supervisor->is_stopping() && !lost->is_last) continue;
    complain(fmt::format(
        "tandem: launch: the launcher (process {}) {}{}", pid, lost->cause,
        lost->is_last ? fmt::format(", the {}th in a row without a further step", fruitless) : ""));
    given_up = 128 + WTERMSIG(status);
    if (supervisor->is_stopping()) return given_up;
  }
}

}  // namespace tandem
