#include "engine/serve/http/http_listen.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "comm/rendezvous/endpoint.h"
#include "core/system/printable.h"
#include "tandem/error.h"

namespace tandem {

namespace http = boost::beast::http;
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

std::optional<HttpRefusal> find_host_refusal(const http::fields& fields, bool is_local,
                                             std::string_view typed) {
  if (fields.count(http::field::host) > 1) return HttpRefusal{400, "Host: expected one"};
  const auto host = fields[http::field::host];
  if (!is_local || is_local_host({host.data(), host.size()}, typed)) return {};
  return HttpRefusal{403, "unknown host name"};
}

void set_answer_fields(http::fields& fields, const char* type) {
  fields.set(http::field::content_type, type);
  fields.set(http::field::cache_control, "no-store");
  fields.set("X-Content-Type-Options", "nosniff");
  fields.set("Content-Security-Policy",
             "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
             "connect-src 'self'; img-src data:; frame-ancestors 'none'");
}

AwaitedRequests::Entry::Entry(AwaitedRequests& all, boost::beast::tcp_stream& stream)
    : all_(all), number_(all.next_++) {
  all_.awaited_[number_] = {&stream};
}

AwaitedRequests::Entry::~Entry() {
  set_bytes(0);
  all_.awaited_.erase(number_);
}

void AwaitedRequests::Entry::set_bytes(size_t bytes) {
  size_t& before = all_.awaited_[number_].bytes;
  all_.bytes_ += bytes - before;
  before = bytes;
}

bool AwaitedRequests::Entry::is_refused() const {
  return all_.awaited_.at(number_).is_refused;
}

bool AwaitedRequests::close_oldest() {
  for (auto& [number, each] : awaited_) {
    if (!each.stream->socket().is_open()) continue;
    each.stream->close();
    return true;
  }
  return false;
}

void AwaitedRequests::refuse_largest() {
  const auto largest =
      std::ranges::max_element(awaited_, {}, [](const auto& each) { return each.second.bytes; });
  if (largest == awaited_.end()) return;
  largest->second.is_refused = true;
  largest->second.stream->cancel();
}

}  // namespace tandem
