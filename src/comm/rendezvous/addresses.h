// Addresses at which other hosts may reach this one.
#pragma once

#include <netinet/in.h>

#include <string>
#include <vector>

namespace tandem::control {

/// Address in IPv6 form; IPv4 is mapped.
struct Interface {
  in6_addr address{}, mask{};
};

bool is_v4(const Interface& interface);
bool is_loopback(const Interface& interface);

/// Interfaces that are up: IPv4 before IPv6, and the loopback last, which reaches only other
/// processes of this host. Link-local addresses are omitted, as they are meaningless without the
/// name of an interface.
std::vector<Interface> local_interfaces();
/// Numeric addresses of these interfaces.
std::vector<std::string> local_addresses();

}  // namespace tandem::control
