#include "cli/stop_signals.h"

#include <fmt/format.h>
#include <pthread.h>

#include <utility>

#include "cli/output.h"

namespace tandem::cli {

StopSignals::StopSignals(std::string answer) : answer_(std::move(answer)) {
  sigemptyset(&watched_);
  for (const int signal : {SIGINT, SIGTERM}) {
    struct sigaction action {};
    // nohup and shells that start a job in the background ignore SIGINT: so does the job.
    if (sigaction(signal, nullptr, &action) == 0 && action.sa_handler == SIG_IGN) continue;
    sigaddset(&watched_, signal);
  }
  sigset_t blocked = watched_;
  sigaddset(&blocked, SIGUSR1);  // wakes the watcher
  pthread_sigmask(SIG_BLOCK, &blocked, &before_);
  watcher_ = std::thread([this] { watch(); });
}

StopSignals::~StopSignals() {
  over_ = true;
  pthread_kill(watcher_.native_handle(), SIGUSR1);
  watcher_.join();
  pthread_sigmask(SIG_SETMASK, &before_, nullptr);
}

void StopSignals::watch() {
  sigset_t awaited = watched_;
  sigaddset(&awaited, SIGUSR1);
  while (!over_) {
    int signal = 0;
    if (sigwait(&awaited, &signal) != 0 || signal == SIGUSR1) continue;
    if (came_.exchange(true)) {
      ::signal(signal, SIG_DFL);
      pthread_sigmask(SIG_UNBLOCK, &watched_, nullptr);
      ::raise(signal);
    }
    if (answer_.empty()) continue;
    complain(fmt::format("\n{}: {}", signal == SIGINT ? "SIGINT" : "SIGTERM", answer_));
  }
}

}  // namespace tandem::cli
