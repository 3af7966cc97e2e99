#include "comm/processes/tcp/peer_address.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <span>

namespace tandem::processes {
namespace {

bool in_one_network(const Interface& local_address, const Interface& other) {
  for (size_t i = 0; i < sizeof local_address.address; ++i) {
    const int differ = local_address.address.s6_addr[i] ^ other.address.s6_addr[i];
    if (differ & local_address.mask.s6_addr[i]) return false;
  }
  return true;
}

}  // namespace

void find_interfaces(PeerAddress& local) {
  const auto interfaces = control::local_interfaces();
  local.count = uint32_t(std::min(interfaces.size(), kAddresses));
  std::copy_n(interfaces.begin(), local.count, local.interfaces.begin());
}

std::vector<Interface> candidates(const PeerAddress& local, const PeerAddress& peer) {
  std::vector<Interface> interfaces;
  for (const Interface& interface : std::span(peer.interfaces).first(peer.count)) {
    if (!is_loopback(interface) || peer.host == local.host) interfaces.push_back(interface);
  }
  std::stable_partition(interfaces.begin(), interfaces.end(), [&](const Interface& interface) {
    const auto local_addresses = std::span(local.interfaces).first(local.count);
    return std::any_of(local_addresses.begin(), local_addresses.end(),
                       [&](const Interface& p) { return in_one_network(p, interface); });
  });
  return interfaces;
}

control::Connection begin_to_connect(const Interface& interface, int port) {
  const int family = is_v4(interface) ? AF_INET : AF_INET6;
  control::Connection connection(::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!connection.open()) return connection;
  sockaddr_in6 v6{};
  v6.sin6_family = AF_INET6;
  v6.sin6_port = htons(uint16_t(port));
  v6.sin6_addr = interface.address;
  sockaddr_in v4{};
  v4.sin_family = AF_INET;
  v4.sin_port = v6.sin6_port;
  std::memcpy(&v4.sin_addr, interface.address.s6_addr + 12, 4);
  const auto* address = family == AF_INET ? reinterpret_cast<const sockaddr*>(&v4)
                                          : reinterpret_cast<const sockaddr*>(&v6);
  const socklen_t length = family == AF_INET ? sizeof v4 : sizeof v6;
  if (connect(connection.fd(), address, length) != 0 && errno != EINPROGRESS) connection.close();
  return connection;
}

}  // namespace tandem::processes
