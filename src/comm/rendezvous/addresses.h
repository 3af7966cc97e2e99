// Addresses at which other hosts may reach this one.
#pragma once

#include <string>
#include <vector>

namespace tandem::control {

/// Numeric addresses of the interfaces that are up: IPv4 before IPv6, the loopback last. Link-local
/// addresses are omitted, as they are meaningless without the name of an interface.
std::vector<std::string> local_addresses();

}  // namespace tandem::control
