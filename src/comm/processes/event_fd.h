// Eventfd that wakes the communication thread from a sleep in poll or epoll.
#pragma once

#include <atomic>

namespace tandem::processes {

class EventFd {
 public:
  /// Throws IoError.
  EventFd();
  ~EventFd();
  EventFd(const EventFd&) = delete;
  EventFd& operator=(const EventFd&) = delete;

  int descriptor() const { return fd_; }
  /// Thread-safe. Work for the sleeper must be published before. Only the first wake since the last
  /// `clear` costs a system call.
  void wake();
  /// Called by the sleeper, when the descriptor is readable and before it checks for work.
  void clear();

 private:
  int fd_;
  std::atomic<bool> raised_{false};
};

}  // namespace tandem::processes
