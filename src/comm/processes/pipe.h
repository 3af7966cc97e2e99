// A pipe that lends pages of this process to a socket: what goes in with `lend` leaves with `drain`
// without having been copied.
#pragma once

#include <cstddef>

#include "comm/processes/sockets.h"

namespace tandem::processes {

class Pipe {
 public:
  /// Throws IoError.
  Pipe();
  size_t bytes() const { return bytes_; }
  /// As much of it as there is room for.
  size_t lend(const std::byte* data, size_t bytes);
  /// Bytes that the socket took; 0 when it would block, -1 when it is broken. `more`: more will
  /// follow soon.
  int64_t drain(int socket, bool more);

 private:
  Socket out_, in_;
  size_t bytes_ = 0;
};

}  // namespace tandem::processes
