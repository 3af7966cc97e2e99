#include "engine/serve/http/listen_address.h"

#include <fmt/format.h>

#include <charconv>
#include <string_view>
#include <system_error>

#include "core/system/printable.h"
#include "tandem/error.h"

namespace tandem {

ListenAddress parse_listen_address(const std::string& option, const std::string& text) {
  const auto fail = [&] {
    throw InvalidArgument(fmt::format("{} {}: expected [HOST:]PORT, a port from 0 to 65535", option,
                                      printable(text)));
  };
  ListenAddress address;
  std::string_view port = text;
  if (const size_t colon = text.rfind(':'); colon != std::string::npos) {
    address.host = text.substr(0, colon);
    port = std::string_view(text).substr(colon + 1);
    if (address.host.starts_with('[') && address.host.ends_with(']')) {
      address.host = address.host.substr(1, address.host.size() - 2);
    } else if (address.host.find(':') != std::string::npos) {
      fail();
    }
    if (address.host.empty()) fail();
  }
  const auto [end, error] = std::from_chars(port.data(), port.data() + port.size(), address.port);
  if (error != std::errc() || end != port.data() + port.size()) fail();
  return address;
}

}  // namespace tandem
