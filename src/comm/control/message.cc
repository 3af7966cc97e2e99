#include "comm/control/message.h"

#include <fmt/format.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <thread>

#include "tandem/error.h"

namespace tandem::control {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint32_t kMostBytes = 64u << 20;

struct FreeAddresses {
  void operator()(addrinfo* list) const { freeaddrinfo(list); }
};

std::unique_ptr<addrinfo, FreeAddresses> resolve(const char* host, int port, int flags) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags;
  const int code = getaddrinfo(host, std::to_string(port).c_str(), &hints, &found);
  if (code != 0) throw Error(fmt::format("{}:{}: {}", host ? host : "", port, gai_strerror(code)));
  return std::unique_ptr<addrinfo, FreeAddresses>(found);
}

int open_socket(const addrinfo& address) {
  return socket(address.ai_family, address.ai_socktype | SOCK_CLOEXEC, address.ai_protocol);
}

bool is_local(const addrinfo& address) {
  if (address.ai_family == AF_INET) {
    const auto& in = reinterpret_cast<const sockaddr_in&>(*address.ai_addr);
    return (ntohl(in.sin_addr.s_addr) >> 24) == 127;
  }
  return IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6&>(*address.ai_addr).sin6_addr);
}

}  // namespace

Connection& Connection::operator=(Connection&& other) noexcept {
  if (this != &other) {
    close();
    fd_ = other.fd_;
    other.fd_ = -1;
  }
  return *this;
}

void Connection::close() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

bool Connection::write_all(const void* from, size_t bytes) const {
  const auto* at = static_cast<const char*>(from);
  while (bytes > 0) {
    const ssize_t sent = ::send(fd_, at, bytes, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) return false;
    at += sent;
    bytes -= size_t(sent);
  }
  return true;
}

bool Connection::read_all(void* to, size_t bytes) const {
  auto* at = static_cast<char*>(to);
  while (bytes > 0) {
    const ssize_t got = ::recv(fd_, at, bytes, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    at += got;
    bytes -= size_t(got);
  }
  return true;
}

bool Connection::send(const Header& header, const void* name, const void* blob) const {
  return write_all(&header, sizeof header) && write_all(name, header.name_bytes) &&
         write_all(blob, header.blob_bytes);
}

bool Connection::readable(double seconds) const {
  const auto until = Clock::now() + std::chrono::duration<double>(seconds);
  for (;;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - Clock::now());
    pollfd entry{fd_, POLLIN, 0};
    const int ready = poll(&entry, 1, int(std::max<int64_t>(0, left.count() + 1)));
    if (ready > 0 || (ready < 0 && errno != EINTR)) return true;
    if (ready == 0 && Clock::now() >= until) return false;
  }
}

Connection::Received Connection::receive(Message& message, double seconds) const {
  if (!readable(seconds)) return Received::timeout;
  if (!read_all(&message.header, sizeof message.header)) return Received::gone;
  const Header& header = message.header;
  if (header.name_bytes > kMostBytes || header.blob_bytes > kMostBytes) return Received::gone;
  message.payload.resize(size_t(header.name_bytes) + header.blob_bytes);
  return read_all(message.payload.data(), message.payload.size()) ? Received::message
                                                                  : Received::gone;
}

Connection::Received Connection::peek(Kind& kind) const {
  Header header{};
  const ssize_t seen = recv(fd_, &header, sizeof header, MSG_PEEK | MSG_DONTWAIT);
  if (seen == 0) return Received::gone;
  if (seen < 0) {
    const bool later = errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
    return later ? Received::timeout : Received::gone;
  }
  if (seen < ssize_t(sizeof header)) return Received::timeout;
  kind = header.kind;
  return Received::message;
}

Connection listen_on(const char* host, int port) {
  const auto any = resolve(nullptr, port, AI_PASSIVE);
  const auto wanted = resolve(host, port, 0);  // without a host: the loopback
  const addrinfo& address = host && is_local(*wanted) ? *wanted : *any;
  Connection listener(open_socket(address));
  const int on = 1;
  setsockopt(listener.fd(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (!listener.open() || bind(listener.fd(), address.ai_addr, address.ai_addrlen) != 0 ||
      listen(listener.fd(), 128) != 0) {
    throw Error(fmt::format("{}:{}: cannot listen: {}", host, port, std::strerror(errno)));
  }
  return listener;
}

Connection connect_to(const char* host, int port, double seconds) {
  const auto until = Clock::now() + std::chrono::duration<double>(seconds);
  const auto addresses = resolve(host, port, 0);
  do {
    for (const addrinfo* a = addresses.get(); a; a = a->ai_next) {
      Connection connection(open_socket(*a));
      if (!connection.open() || connect(connection.fd(), a->ai_addr, a->ai_addrlen) != 0) continue;
      const int on = 1;
      setsockopt(connection.fd(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
      return connection;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  } while (Clock::now() < until);
  return {};
}

}  // namespace tandem::control
