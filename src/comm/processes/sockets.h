// TCP connections between every two processes of a world, made with the bootstrap's help: each
// process listens on its own port, IPv6 and IPv4, and sends the others its addresses. A random
// secret exchanged with them excludes strangers (comm/rendezvous/handshake.h), which are never
// waited for.
#pragma once

#include <utility>
#include <vector>

#include "comm/processes/bootstrap.h"

namespace tandem::processes {

/// File descriptor closed on destruction.
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

/// Collective. Sockets by rank, this rank's empty; non-blocking, without Nagle's delay. Empty on
/// every process if any of the connections could not be made.
std::vector<Socket> connect_all(Bootstrap& bootstrap);

}  // namespace tandem::processes
