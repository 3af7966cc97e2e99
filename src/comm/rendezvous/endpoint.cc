#include "comm/rendezvous/endpoint.h"

#include <fmt/format.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <memory>
#include <optional>
#include <string_view>
#include <thread>

#include "comm/rendezvous/secret.h"
#include "core/system/process/file_limit.h"
#include "tandem/error.h"

namespace tandem::control {
namespace {

constexpr double kConnectSeconds = 5;
constexpr auto kPortPause = std::chrono::milliseconds(20);

union Address {
  sockaddr any;
  sockaddr_in v4;
  sockaddr_in6 v6;
  sockaddr_un local;
  sockaddr_storage storage;
};

// Name in Linux's abstract namespace: no file, removed with the process.
socklen_t local_address(const std::string& name, Address& address) {
  address = {};
  address.local.sun_family = AF_UNIX;
  name.copy(address.local.sun_path + 1, sizeof address.local.sun_path - 1);
  return socklen_t(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

Connection open_socket(int family) {
  Connection connection(socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const int on = 1;
  if (family != AF_UNIX) {
    setsockopt(connection.fd(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  }
  return connection;
}

struct FreeAddresses {
  void operator()(addrinfo* list) const { freeaddrinfo(list); }
};
using Addresses = std::unique_ptr<addrinfo, FreeAddresses>;

// Retries a temporary failure: while a cluster starts, names may appear late.
Addresses resolve(const Endpoint& endpoint, Clock::time_point until) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  const std::string port = std::to_string(endpoint.port);
  for (;;) {
    const int code = getaddrinfo(endpoint.host.c_str(), port.c_str(), &hints, &found);
    if (code == 0) return Addresses(found);
    if (code != EAI_AGAIN || Clock::now() >= until) {
      throw Error(fmt::format("{}: {}", endpoint.describe(), gai_strerror(code)));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
  }
}

// Connects to one address; on failure returns a connection that is not open and sets errno.
Connection connect_one(int family, const sockaddr* address, socklen_t length,
                       Clock::time_point until) {
  Connection connection = open_socket(family);
  if (!connection.open()) return connection;
  if (connect(connection.fd(), address, length) == 0) return connection;
  int error = errno;
  if (error == EINPROGRESS) {
    socklen_t bytes = sizeof error;
    error = ETIMEDOUT;
    if (wait_until(connection.fd(), POLLOUT, until)) {
      getsockopt(connection.fd(), SOL_SOCKET, SO_ERROR, &error, &bytes);
    }
  }
  if (error == 0) return connection;
  connection.close();
  errno = error;
  return connection;
}

// Binds IPv6's wildcard, which accepts IPv4 too; IPv4's if the system has no IPv6.
Connection bind_everywhere(int port) {
  Connection listener;
  for (const int family : {AF_INET6, AF_INET}) {
    listener = open_socket(family);
    if (!listener.open()) continue;
    const int on = 1, off = 0;
    setsockopt(listener.fd(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    Address address{};
    socklen_t length = sizeof address.v4;
    if (family == AF_INET6) {
      setsockopt(listener.fd(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
      address.v6.sin6_family = AF_INET6;
      address.v6.sin6_port = htons(uint16_t(port));
      length = sizeof address.v6;
    } else {
      address.v4.sin_family = AF_INET;
      address.v4.sin_port = htons(uint16_t(port));
    }
    if (bind(listener.fd(), &address.any, length) == 0) return listener;
    if (errno == EADDRINUSE || errno == EACCES) break;  // would fail for every family
  }
  const int error = errno;
  listener.close();
  errno = error;
  return listener;
}

Connection bind_local(const std::string& name) {
  Connection listener = open_socket(AF_UNIX);
  Address address;
  const socklen_t length = local_address(name, address);
  if (listener.open() && bind(listener.fd(), &address.any, length) == 0) return listener;
  const int error = errno;
  listener.close();
  errno = error;
  return listener;
}

using Name = int (*)(int, sockaddr*, socklen_t*);

std::optional<Address> address_of(const Connection& connection, Name name) {
  Address address{};
  socklen_t length = sizeof address;
  if (name(connection.fd(), &address.any, &length) != 0) return std::nullopt;
  return address;
}

// Numeric text, without the prefix of IPv4 addresses on a dual-stack socket.
std::string text_of_address(const Address& address) {
  char text[NI_MAXHOST] = {};
  const socklen_t length =
      address.any.sa_family == AF_INET6 ? sizeof address.v6 : sizeof address.v4;
  if (address.any.sa_family == AF_UNIX ||
      getnameinfo(&address.any, length, text, sizeof text, nullptr, 0, NI_NUMERICHOST) != 0) {
    return "this host";
  }
  constexpr std::string_view kMapped = "::ffff:";
  const std::string_view all = text;
  const bool mapped = all.starts_with(kMapped) && all.find('.') != all.npos;
  return std::string(mapped ? all.substr(kMapped.size()) : all);
}

}  // namespace

std::string Endpoint::describe() const {
  if (!local.empty()) return "local socket " + local;
  const bool colons = host.find(':') != host.npos;
  return colons ? fmt::format("[{}]:{}", host, port) : fmt::format("{}:{}", host, port);
}

Endpoint endpoint_of(const Launch& launch) {
  if (!launch.one_host) return {"", launch.host, launch.port, launch.port_from};
  const Digest world = sha256(std::as_bytes(std::span(launch.world.data(), launch.world.size())));
  return {fmt::format("tandem-{}-{}-{}", geteuid(), launch.port, hex_of(std::span(world).first(8))),
          "", 0, launch.port_from};
}

Connection listen_on(const Endpoint& endpoint, double patience_s) {
  const bool local = !endpoint.local.empty();
  const auto until = after(patience_s);
  while (true) {
    Connection listener = local ? bind_local(endpoint.local) : bind_everywhere(endpoint.port);
    if (listener.open() && listen(listener.fd(), SOMAXCONN) == 0) return listener;
    const int error = errno;
    if (error == EADDRINUSE && Clock::now() < until) {
      std::this_thread::sleep_for(kPortPause);
      continue;
    }
    const std::string text =
        fmt::format("{}: rank 0 cannot listen: {}", endpoint.describe(), describe_errno(error));
    if (error != EADDRINUSE && error != EACCES) throw IoError(text);
    throw InvalidArgument(fmt::format(
        "{}: expected a free port{}", text,
        endpoint.port_from.empty() ? "" : fmt::format(" ({} gave it)", endpoint.port_from)));
  }
}

int port_of(const Connection& listener) {
  const auto address = address_of(listener, getsockname);
  if (!address || address->any.sa_family == AF_UNIX) return 0;
  return ntohs(address->any.sa_family == AF_INET ? address->v4.sin_port : address->v6.sin6_port);
}

Connection connect_to(const Endpoint& endpoint, double seconds, std::string& why) {
  const auto until = after(seconds);
  Connection connection;
  if (!endpoint.local.empty()) {
    Address address;
    const socklen_t length = local_address(endpoint.local, address);
    connection = connect_one(AF_UNIX, &address.any, length, until);
    if (!connection.open()) why = describe_errno(errno);
    return connection;
  }
  const Addresses addresses = resolve(endpoint, until);
  for (const addrinfo* a = addresses.get(); a && !connection.open(); a = a->ai_next) {
    connection = connect_one(a->ai_family, a->ai_addr, a->ai_addrlen,
                             std::min(until, after(kConnectSeconds)));
    if (!connection.open()) why = describe_errno(errno);
  }
  return connection;
}

bool is_another_users(const Connection& connection) {
  const auto address = address_of(connection, getsockname);
  if (!address || address->any.sa_family != AF_UNIX) return false;
  ucred credentials{};
  socklen_t length = sizeof credentials;
  return getsockopt(connection.fd(), SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0 ||
         credentials.uid != geteuid();
}

std::string peer_address(const Connection& connection) {
  const auto peer = address_of(connection, getpeername);
  return peer ? text_of_address(*peer) : "an unknown address";
}

}  // namespace tandem::control
