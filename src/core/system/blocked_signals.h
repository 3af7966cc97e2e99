// Signals kept from threads that libraries start.
#pragma once

#include <pthread.h>

#include <csignal>

namespace tandem {

/// Blocks all signals during its lifetime, in this thread and, for as long as they live, in threads
/// that are started meanwhile. A library's threads that are started so, as CUDA's, leave the
/// process's signals to threads that wait for them (engine/launch/stop_signals.h): one that does
/// not block a signal would take it and end the process.
class BlockedSignals {
 public:
  BlockedSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before_);
  }
  ~BlockedSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  BlockedSignals(const BlockedSignals&) = delete;
  BlockedSignals& operator=(const BlockedSignals&) = delete;

 private:
  sigset_t before_;
};

}  // namespace tandem
