#include "comm/rendezvous/addresses.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>

#include "comm/rendezvous/launch.h"

namespace tandem::control {

std::vector<std::string> local_addresses() {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return {};
  std::vector<std::string> all;
  for (const ifaddrs* at = list; at; at = at->ifa_next) {
    if (!at->ifa_addr || !(at->ifa_flags & IFF_UP)) continue;
    const int family = at->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    if (family == AF_INET6 &&
        IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<const sockaddr_in6*>(at->ifa_addr)->sin6_addr)) {
      continue;
    }
    const socklen_t length = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    char text[NI_MAXHOST] = {};
    if (getnameinfo(at->ifa_addr, length, text, sizeof text, nullptr, 0, NI_NUMERICHOST) == 0) {
      all.emplace_back(text);
    }
  }
  freeifaddrs(list);
  std::stable_partition(all.begin(), all.end(),
                        [](const std::string& each) { return each.find(':') == each.npos; });
  std::stable_partition(all.begin(), all.end(),
                        [](const std::string& each) { return !is_loopback(each); });
  return all;
}

}  // namespace tandem::control
