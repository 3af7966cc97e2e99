// Eventfd that wakes the communication thread from a sleep in poll or epoll.
#pragma once

#include <atomic>
#include <utility>

namespace tandem::processes {

class EventFd {
 public:
  /// Throws IoError.
  EventFd();
  ~EventFd();
  EventFd(const EventFd&) = delete;
  EventFd& operator=(const EventFd&) = delete;

  int descriptor() const { return epoll_ < 0 ? fd_ : epoll_; }
  /// Wakes the sleeper also if `fd` is readable, from then on; before the descriptor is used.
  /// Throws IoError.
  void add(int fd);
  /// Ignores the added one for a while, or heeds it again. Thread-safe.
  void heed(int fd, bool on);
  /// Ignores the added one from now on: it has ended.
  void remove(int fd);
  /// Whether the added one was readable at the last `clear`; asked by the sleeper.
  bool take_added() { return std::exchange(added_ready_, false); }
  /// Thread-safe. Work for the sleeper must be published before. Only the first wake since the last
  /// `clear` costs a system call.
  void wake();
  /// Called by the sleeper, when the descriptor is readable and before it checks for work.
  void clear();

 private:
  int fd_, epoll_ = -1;
  bool added_ready_ = false;
  std::atomic<bool> raised_{false};
};

}  // namespace tandem::processes
