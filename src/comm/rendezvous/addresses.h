// The addresses at which others may reach this host.
#pragma once

#include <string>
#include <vector>

namespace tandem::control {

/// Numeric, of the interfaces that are up: IPv4 before IPv6, the loopback last. Link-local
/// addresses are left out, as they mean nothing without the name of an interface.
std::vector<std::string> own_addresses();

}  // namespace tandem::control
