// The addresses of this host, as others may reach it by.
#pragma once

#include <string>
#include <vector>

namespace tandem::control {

/// Numeric, of the interfaces that are up: IPv4 before IPv6, the loopback last. None that means
/// nothing without an interface (link-local).
std::vector<std::string> own_addresses();

}  // namespace tandem::control
