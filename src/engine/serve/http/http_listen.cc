#include "engine/serve/http/http_listen.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "comm/rendezvous/endpoint.h"
#include "core/system/printable.h"
#include "tandem/error.h"

namespace tandem {
namespace {

namespace net = boost::asio;
namespace http = boost::beast::http;
using net::ip::tcp;

constexpr std::chrono::milliseconds kRetryTime{100};
constexpr auto kAwait = net::as_tuple(net::use_awaitable);

/// Socket that listens at `address`. Throws IoError that begins with `name`.
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

/// URL of a listening socket, with the typed host if it listens at all addresses.
std::string url_of(const tcp::endpoint& at, const ListenAddress& typed) {
  const std::string host = at.address().is_v6() ? fmt::format("[{}]", at.address().to_string())
                           : at.address().is_unspecified() ? typed.host
                                                           : at.address().to_string();
  return fmt::format("http://{}:{}/", host, at.port());
}

}  // namespace

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

HttpListener::HttpListener(net::io_context& context, const ListenAddress& address,
                           std::string_view name, const HttpLimits& limits, Talk talk)
    : context_(context),
      address_(address),
      talk_(std::move(talk)),
      clients_(std::make_shared<HttpClients>(limits)),
      acceptor_(listen_at(context, address, name)),
      url_(url_of(acceptor_.local_endpoint(), address)),
      is_local_(acceptor_.local_endpoint().address().is_loopback()) {}

void HttpListener::start() {
  net::co_spawn(context_, accept(), net::detached);
}

std::optional<ApiError> HttpListener::find_refusal(const HttpRequest& request) const {
  if (request.count(http::field::host) > 1) return ApiError(400, "Host: expected one");
  const bool has_host = request.count(http::field::host) > 0;
  if (!has_host && request.version() >= 11) return ApiError(400, "Host: expected one");
  // A page of another site may give this machine's address a name of its own. Its browser says so.
  const auto host = request[http::field::host];
  if (!is_local_ || !has_host || is_local_host({host.data(), host.size()}, address_.host))
    return {};
  return ApiError(403, fmt::format("Host {}: expected localhost or {}",
                                   printable({host.data(), host.size()}), address_.host));
}

net::awaitable<void> HttpListener::accept() {
  while (true) {
    auto [error, socket] = co_await acceptor_.async_accept(kAwait);
    const bool has_room =
        (!error && clients_->count < clients_->limits.clients) || clients_->awaited.close_oldest();
    if (error) {  // as for lack of descriptors, until a client has left
      net::steady_timer timer(context_, kRetryTime);
      co_await timer.async_wait(kAwait);
    } else if (has_room) {
      net::co_spawn(context_, run(std::move(socket)), net::detached);
    }
  }
}

net::awaitable<void> HttpListener::run(tcp::socket socket) {
  HttpConnection connection(std::move(socket), clients_);
  co_await talk_(connection);
  connection.shutdown_send();
}

}  // namespace tandem
