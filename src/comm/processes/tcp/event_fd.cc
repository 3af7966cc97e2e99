#include "comm/processes/tcp/event_fd.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <string>

#include "core/system/process/file_limit.h"
#include "tandem/error.h"

namespace tandem::processes {

EventFd::EventFd() : fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (fd_ < 0) throw IoError(std::string("eventfd: ") + describe_errno(errno));
}

EventFd::~EventFd() {
  ::close(fd_);
  if (epoll_ >= 0) ::close(epoll_);
}

void EventFd::add(int fd) {
  epoll_ = epoll_create1(EPOLL_CLOEXEC);
  epoll_event event{};
  event.events = EPOLLIN;
  for (const int each : {fd_, fd}) {
    event.data.fd = each;
    if (epoll_ < 0 || epoll_ctl(epoll_, EPOLL_CTL_ADD, each, &event) != 0) {
      throw IoError(std::string("epoll: ") + describe_errno(errno));
    }
  }
}

void EventFd::heed(int fd, bool on) {
  epoll_event event{};
  event.events = on ? uint32_t(EPOLLIN) : 0;
  event.data.fd = fd;
  epoll_ctl(epoll_, EPOLL_CTL_MOD, fd, &event);
}

void EventFd::remove(int fd) {
  epoll_ctl(epoll_, EPOLL_CTL_DEL, fd, nullptr);
}

void EventFd::wake() {
  if (raised_.exchange(true)) return;
  const uint64_t one = 1;
  while (write(fd_, &one, sizeof one) < 0 && errno == EINTR) {
  }
}

void EventFd::clear() {
  if (epoll_ >= 0) {
    epoll_event events[2];
    const int count = epoll_wait(epoll_, events, 2, 0);
    bool woken = false;
    for (int i = 0; i < count; ++i) {
      (events[i].data.fd == fd_ ? woken : added_ready_) = true;
    }
    if (!woken) return;
  }
  uint64_t count;
  while (read(fd_, &count, sizeof count) < 0 && errno == EINTR) {
  }
  raised_.store(false);
}

}  // namespace tandem::processes
