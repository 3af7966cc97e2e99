#include "comm/processes/waker.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>

#include "tandem/error.h"

namespace tandem::processes {

Waker::Waker() : fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (fd_ < 0) throw IoError(std::string("eventfd: ") + std::strerror(errno));
}

Waker::~Waker() {
  ::close(fd_);
}

void Waker::wake() {
  if (raised_.exchange(true)) return;
  const uint64_t one = 1;
  while (write(fd_, &one, sizeof one) < 0 && errno == EINTR) {
  }
}

void Waker::clear() {
  uint64_t count;
  while (read(fd_, &count, sizeof count) < 0 && errno == EINTR) {
  }
  raised_.store(false);
}

}  // namespace tandem::processes
