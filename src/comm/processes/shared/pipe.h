// Pipe that passes pages of this process to a socket zero-copy: bytes enter with `lend` and leave
// with `drain`.
#pragma once

#include <cstddef>
#include <cstdint>

#include "comm/rendezvous/connection.h"

namespace tandem::processes {

class Pipe {
 public:
  /// Throws IoError.
  Pipe();
  size_t bytes() const { return bytes_; }
  /// Adds as many bytes as fit and returns their number.
  size_t lend(const std::byte* data, size_t bytes);
  /// Returns the number of bytes that the socket accepted; 0 if it would block, -1 if it is broken.
  /// `more`: more will follow soon.
  int64_t drain(int socket, bool more);

 private:
  control::Connection out_, in_;
  size_t bytes_ = 0;
};

}  // namespace tandem::processes
