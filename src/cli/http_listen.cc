#include "cli/http_listen.h"

#include <fmt/format.h>

#include "core/printable.h"
#include "tandem/error.h"

namespace tandem::cli {

using boost::asio::ip::tcp;

tcp::acceptor listen_at(boost::asio::io_context& context, const ListenAddress& address,
                        std::string_view name) {
  tcp::acceptor acceptor(context);
  try {
    tcp::resolver resolver(context);
    const auto found = resolver.resolve(address.host, std::to_string(address.port),
                                        tcp::resolver::passive | tcp::resolver::numeric_service);
    const tcp::endpoint endpoint = found.begin()->endpoint();
    acceptor.open(endpoint.protocol());
    acceptor.set_option(tcp::acceptor::reuse_address(true));
    acceptor.bind(endpoint);
    acceptor.listen();
  } catch (const boost::system::system_error& error) {
    throw IoError(fmt::format("{} at {}:{}: cannot listen: {}", name, printable(address.host),
                              address.port, error.code().message()));
  }
  return acceptor;
}

std::string url_of(const tcp::endpoint& at, const ListenAddress& typed) {
  const std::string host = at.address().is_v6() ? fmt::format("[{}]", at.address().to_string())
                           : at.address().is_unspecified() ? typed.host
                                                           : at.address().to_string();
  return fmt::format("http://{}:{}/", host, at.port());
}

bool is_local_name(std::string_view host) {
  for (const std::string_view name : {"localhost", "127.0.0.1", "[::1]"}) {
    if (host == name) return true;
    if (host.starts_with(name) && host.substr(name.size()).starts_with(':')) return true;
  }
  return false;
}

}  // namespace tandem::cli
