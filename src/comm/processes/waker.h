// Waker: a descriptor that wakes the communication thread from a sleep in poll or epoll.
#pragma once

#include <atomic>

namespace tandem::processes {

class Waker {
 public:
  /// Throws IoError.
  Waker();
  ~Waker();
  Waker(const Waker&) = delete;
  Waker& operator=(const Waker&) = delete;

  int descriptor() const { return fd_; }
  /// Any thread. What the sleeper is to find must be in place before. Only the first wake since
  /// the last `clear` costs a system call.
  void wake();
  /// The sleeper's, when the descriptor is readable and before it looks for what there is to do.
  void clear();

 private:
  int fd_;
  std::atomic<bool> raised_{false};
};

}  // namespace tandem::processes
