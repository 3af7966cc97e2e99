// Signals to a training: SIGINT, SIGTERM and SIGHUP request a stop, SIGUSR1 and SIGUSR2 a
// checkpoint.
#pragma once

#include <atomic>
#include <csignal>
#include <string>
#include <thread>

namespace tandem {

/// Exit status of a training that was stopped, with a checkpoint: a shell's for SIGINT.
constexpr int kStopped = 130;

/// Signals of these that this process does not ignore: nohup and shells, for background jobs,
/// let it ignore some.
sigset_t watched_signals();

/// Keeps SIGUSR1 and SIGUSR2 from ending this process, until it ends: one that comes before a
/// StopSignals waits for it, one that comes after it has no effect. Call it before any other thread
/// is started. `tandem train` and `tandem launch` begin with it, before libraries are initialized.
void hold_save_requests();
/// Signals that were blocked when this process began.
const sigset_t& inherited_signals();
/// Drops those that wait.
void drop_save_requests();

/// Blocks these signals, during its lifetime, in threads started by the calling one: a dedicated
/// thread waits for them, so that no system call is interrupted. Construct it before any other
/// thread.
///
/// The first stop request is recorded; another more than a second later ends the process. Earlier
/// ones count as the same request: timeout(1) and launchers signal both the process and its group.
class StopSignals {
 public:
  /// `answer` is printed on the first stop request, after the signal's name; empty: no output.
  explicit StopSignals(std::string answer);
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  const std::atomic<bool>& came() const { return came_; }
  /// Number of checkpoint requests that were not taken.
  std::atomic<int>& saves() { return saves_; }

 private:
  void await_signals();
  void stop_for(int signal);

  std::string answer_;
  sigset_t watched_, before_;
  int signals_, over_;  // over_: readable once the watcher must end
  std::atomic<bool> came_{false};
  std::atomic<int> saves_{0};
  double came_at_ = 0;
  std::thread waiter_;
};

}  // namespace tandem
