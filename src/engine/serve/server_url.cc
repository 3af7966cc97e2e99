#include <fmt/format.h>

#include <string_view>

#include "core/system/printable.h"
#include "engine/serve/http/completion_load.h"
#include "tandem/error.h"

namespace tandem {

ServerUrl parse_server_url(const std::string& text) {
  const auto fail = [&] {
    throw InvalidArgument(
        fmt::format("URL {}: expected http://HOST[:PORT][/PATH]", printable(text)));
  };
  constexpr std::string_view kScheme = "http://";
  if (!text.starts_with(kScheme)) fail();
  std::string_view rest = std::string_view(text).substr(kScheme.size());
  ServerUrl url{.host = "", .port = "80", .path = ""};
  if (const size_t slash = rest.find('/'); slash != rest.npos) {
    url.path = rest.substr(slash);
    while (url.path.ends_with('/')) url.path.pop_back();
    for (const std::string_view end : {"/completions", "/v1"}) {
      if (url.path.ends_with(end)) url.path.resize(url.path.size() - end.size());
    }
    rest = rest.substr(0, slash);
  }
  if (rest.starts_with('[')) {
    const size_t end = rest.find(']');
    if (end == rest.npos) fail();
    url.host = rest.substr(1, end - 1);
    rest.remove_prefix(end + 1);
  } else {
    url.host = rest.substr(0, rest.find(':'));
    rest.remove_prefix(url.host.size());
  }
  if (rest.starts_with(':')) {
    url.port = rest.substr(1);
    const bool is_number = !url.port.empty() && url.port.size() <= 5 &&
                           url.port.find_first_not_of("0123456789") == url.port.npos;
    if (!is_number || std::stoi(url.port) < 1 || std::stoi(url.port) > 65535) fail();
  } else if (!rest.empty()) {
    fail();
  }
  const bool is_valid = url.host.find_first_of(" \t\r\n@?#") == url.host.npos &&
                        url.path.find_first_of(" \t\r\n?#") == url.path.npos;
  if (url.host.empty() || !is_valid) fail();
  return url;
}

}  // namespace tandem
