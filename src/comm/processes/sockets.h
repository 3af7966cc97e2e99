// A TCP connection between every two processes of a world, made with the bootstrap's help: each
// process listens on a port of its own, IPv6 and IPv4, and tells the others its addresses. A random
// secret that goes round with them keeps strangers out (comm/rendezvous/handshake.h), and none is
// waited for.
#pragma once

#include <utility>
#include <vector>

#include "comm/processes/bootstrap.h"

namespace tandem::processes {

/// A descriptor that closes itself.
class Socket {
 public:
  explicit Socket(int fd = -1) : fd_(fd) {}
  ~Socket();
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_;
};

/// Collective. By rank, this one's own empty; non-blocking, without Nagle's delay. Empty on every
/// process when any of the connections could not be made.
std::vector<Socket> connect_all(Bootstrap& bootstrap);

}  // namespace tandem::processes
