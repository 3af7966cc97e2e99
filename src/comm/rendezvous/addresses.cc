#include "comm/rendezvous/addresses.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cstring>

namespace tandem::control {
namespace {

in6_addr as_v6(const sockaddr* address, unsigned char fill) {
  in6_addr v6{};
  if (address->sa_family == AF_INET6) {
    return reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr;
  }
  std::fill_n(v6.s6_addr, 12, fill);
  std::fill_n(v6.s6_addr + 10, 2, 0xff);
  std::memcpy(v6.s6_addr + 12, &reinterpret_cast<const sockaddr_in*>(address)->sin_addr, 4);
  return v6;
}

}  // namespace

bool is_v4(const Interface& interface) {
  return IN6_IS_ADDR_V4MAPPED(&interface.address);
}

bool is_loopback(const Interface& interface) {
  return is_v4(interface) ? interface.address.s6_addr[12] == 127
                          : IN6_IS_ADDR_LOOPBACK(&interface.address);
}

std::vector<Interface> local_interfaces() {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return {};
  std::vector<Interface> all;
  for (const ifaddrs* at = list; at; at = at->ifa_next) {
    if (!at->ifa_addr || !at->ifa_netmask || !(at->ifa_flags & IFF_UP)) continue;
    const auto family = at->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    const Interface interface { as_v6(at->ifa_addr, 0), as_v6(at->ifa_netmask, 0xff) };
    if (!IN6_IS_ADDR_LINKLOCAL(&interface.address)) all.push_back(interface);
  }
  freeifaddrs(list);
  std::stable_partition(all.begin(), all.end(), is_v4);
  std::stable_partition(all.begin(), all.end(),
                        [](const Interface& interface) { return !is_loopback(interface); });
  return all;
}

std::vector<std::string> local_addresses() {
  std::vector<std::string> all;
  for (const Interface& interface : local_interfaces()) {
    std::array<char, INET6_ADDRSTRLEN> text{};
    const auto* bytes = interface.address.s6_addr;
    const bool v4 = is_v4(interface);
    inet_ntop(v4 ? AF_INET : AF_INET6, v4 ? bytes + 12 : bytes, text.data(), text.size());
    all.emplace_back(text.data());
  }
  return all;
}

}  // namespace tandem::control
