#include "cli/http_listen.h"

#include <fmt/format.h>

#include <boost/beast/core/string.hpp>
#include <chrono>
#include <thread>

#include "comm/rendezvous/endpoint.h"
#include "core/printable.h"
#include "tandem/error.h"

namespace tandem::cli {

using boost::asio::ip::tcp;

tcp::acceptor listen_at(boost::asio::io_context& context, const ListenAddress& address,
                        std::string_view name) {
  const auto until = control::after(control::kPortPatienceS);
  while (true) {
    try {
      tcp::acceptor acceptor(context);
      tcp::resolver resolver(context);
      const auto found = resolver.resolve(address.host, std::to_string(address.port),
                                          tcp::resolver::passive | tcp::resolver::numeric_service);
      const tcp::endpoint endpoint = found.begin()->endpoint();
      acceptor.open(endpoint.protocol());
      acceptor.set_option(tcp::acceptor::reuse_address(true));
      acceptor.bind(endpoint);
      acceptor.listen();
      return acceptor;
    } catch (const boost::system::system_error& error) {
      const bool is_taken = error.code() == boost::asio::error::address_in_use;
      if (!is_taken || control::Clock::now() > until) {
        throw IoError(fmt::format("{} at {}:{}: cannot listen: {}", name, printable(address.host),
                                  address.port, error.code().message()));
      }
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

std::string url_of(const tcp::endpoint& at, const ListenAddress& typed) {
  const std::string host = at.address().is_v6() ? fmt::format("[{}]", at.address().to_string())
                           : at.address().is_unspecified() ? typed.host
                                                           : at.address().to_string();
  return fmt::format("http://{}:{}/", host, at.port());
}

bool is_local_host(std::string_view host, std::string_view typed) {
  const size_t colon = host.rfind(':');
  if (const size_t bracket = host.rfind(']');
      colon != host.npos && (bracket == host.npos || bracket < colon)) {
    const std::string_view port = host.substr(colon + 1);
    if (port.find_first_not_of("0123456789") != port.npos) return false;
    host = host.substr(0, colon);
  }
  const bool is_v6 = host.starts_with('[') && host.ends_with(']');
  if (is_v6) host = host.substr(1, host.size() - 2);
  if (!is_v6 && boost::beast::iequals(host, "localhost")) return true;
  if (boost::beast::iequals(host, typed)) return true;
  boost::system::error_code error;
  const auto address = boost::asio::ip::make_address(std::string(host), error);
  return !error && address.is_v6() == is_v6 && address.is_loopback();
}

}  // namespace tandem::cli
