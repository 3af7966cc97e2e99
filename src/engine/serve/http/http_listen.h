// Listening socket of the program's HTTP servers. Needs Boost.
#pragma once

#include <boost/asio.hpp>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "engine/serve/http/http_connection.h"
#include "engine/serve/http/listen_address.h"

namespace tandem {

/// Whether the host of a request is an address of this machine's loopback, localhost or the `typed`
/// one: a page of another site may give its name such an address, and its scripts must not read
/// what is served.
bool is_local_host(std::string_view host, std::string_view typed);

/// Listening socket of a server, and its connections.
class HttpListener {
 public:
  /// Runs one connection.
  using Talk = std::function<boost::asio::awaitable<void>(HttpConnection&)>;

  /// Throws IoError that begins with `name` if it cannot listen.
  HttpListener(boost::asio::io_context& context, const ListenAddress& address,
               std::string_view name, const HttpLimits& limits, Talk talk);

  /// Accepts connections from now on, until the context ends.
  void start();
  const std::string& url() const { return url_; }
  /// Whether only this machine can connect.
  bool is_local() const { return is_local_; }
  /// Reason to refuse a request by its Host fields: several, or a host that is not
  /// local if only this machine can connect.
  std::optional<ApiError> find_refusal(const HttpRequest& request) const;

 private:
  boost::asio::awaitable<void> accept();
  boost::asio::awaitable<void> run(boost::asio::ip::tcp::socket socket);

  boost::asio::io_context& context_;
  const ListenAddress address_;
  const Talk talk_;
  const std::shared_ptr<HttpClients> clients_;
  boost::asio::ip::tcp::acceptor acceptor_;
  const std::string url_;
  const bool is_local_;
};

}  // namespace tandem
