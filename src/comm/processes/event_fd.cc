#include "comm/processes/event_fd.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>

#include "tandem/error.h"

namespace tandem::processes {

EventFd::EventFd() : fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (fd_ < 0) throw IoError(std::string("eventfd: ") + std::strerror(errno));
}

EventFd::~EventFd() {
  ::close(fd_);
}

void EventFd::wake() {
  if (raised_.exchange(true)) return;
  const uint64_t one = 1;
  while (write(fd_, &one, sizeof one) < 0 && errno == EINTR) {
  }
}

void EventFd::clear() {
  uint64_t count;
  while (read(fd_, &count, sizeof count) < 0 && errno == EINTR) {
  }
  raised_.store(false);
}

}  // namespace tandem::processes
