// Signals to a training: SIGINT, SIGTERM and SIGHUP are a wish to stop, SIGUSR1 and SIGUSR2 a wish
// to save.
#pragma once

#include <atomic>
#include <csignal>
#include <string>
#include <thread>

namespace tandem::cli {

/// While it lives, threads that the calling one starts see none of these signals: a thread of its
/// own waits for them, so that no system call is interrupted. Make it before any other thread.
///
/// The first wish to stop is noted; another one that comes more than a second later ends the
/// process. Until then it is taken for the same wish: timeout(1) and launchers send theirs to the
/// process and to its group.
class StopSignals {
 public:
  /// `answer` is printed on the first wish to stop, after the signal's name; nothing when it is
  /// empty.
  explicit StopSignals(std::string answer);
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  const std::atomic<bool>& came() const { return came_; }
  /// How often a checkpoint was asked for.
  const std::atomic<int>& saves() const { return saves_; }

 private:
  void watch();
  void stop_for(int signal);

  std::string answer_;
  sigset_t watched_, before_;
  int signals_, over_;  // over_: readable once the watcher is to end
  std::atomic<bool> came_{false};
  std::atomic<int> saves_{0};
  double came_at_ = 0;
  std::thread watcher_;
};

}  // namespace tandem::cli
