// SIGINT and SIGTERM as a wish to stop: the first one is noted, a second one ends the process.
#pragma once

#include <atomic>
#include <csignal>
#include <string>
#include <thread>

namespace tandem::cli {

/// While it lives, threads that the calling one starts see neither signal: a thread of its own
/// waits for them, so that no system call is interrupted. Make it before any other thread.
class StopSignals {
 public:
  /// `answer` is printed on the first signal, after its name; nothing when it is empty.
  explicit StopSignals(std::string answer);
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  const std::atomic<bool>& came() const { return came_; }

 private:
  void watch();

  std::string answer_;
  sigset_t watched_, before_;
  std::atomic<bool> came_{false}, over_{false};
  std::thread watcher_;
};

}  // namespace tandem::cli
