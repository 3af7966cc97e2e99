#include "comm/processes/sockets.h"

#include <unistd.h>

namespace tandem::processes {

Socket::~Socket() {
  if (fd_ >= 0) ::close(fd_);
}

}  // namespace tandem::processes
