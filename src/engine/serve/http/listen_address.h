// Address at which a command serves a page or an interface.
#pragma once

#include <cstdint>
#include <string>

namespace tandem {

struct ListenAddress {
  std::string host = "127.0.0.1";  ///< name or address
  uint16_t port = 0;               ///< 0: a free one
};

/// Parses "[HOST:]PORT", with an IPv6 address in brackets. Throws InvalidArgument naming `option`.
ListenAddress parse_listen_address(const std::string& option, const std::string& text);

}  // namespace tandem
