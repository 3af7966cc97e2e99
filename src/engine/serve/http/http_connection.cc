#include "engine/serve/http/http_connection.h"

#include <fmt/format.h>
#include <poll.h>

#include <algorithm>
#include <tuple>
#include <utility>
#include <vector>

namespace tandem {
namespace {

namespace net = boost::asio;
namespace beast = boost::beast;
namespace http = beast::http;
using net::ip::tcp;
using ErrorCode = boost::system::error_code;

constexpr std::chrono::seconds kRequestTime{30}, kWriteTime{30}, kIdleTime{75}, kDropTime{2};
constexpr std::chrono::milliseconds kWatchTime{100};   // between looks at a client that waits
constexpr std::chrono::milliseconds kProbeTime{1000};  // before the first probe; doubles after each

constexpr size_t kMinDroppedBytes = 1 << 20;
constexpr std::string_view kContinue = "HTTP/1.1 100 Continue\r\n\r\n";
constexpr auto kAwait = net::as_tuple(net::use_awaitable);

/// State of a client by its connection: it may have sent all it will, and still read, or be gone.
enum class ClientState : uint8_t { open, half_closed, gone };

ClientState find_state(tcp::socket& socket) {
  pollfd events{socket.native_handle(), POLLRDHUP, 0};
  if (::poll(&events, 1, 0) <= 0) return ClientState::open;
  const bool is_gone = (events.revents & (POLLERR | POLLHUP | POLLNVAL)) != 0;
  return is_gone ? ClientState::gone : ClientState::half_closed;
}

/// Sets the fields of every answer.
void set_fields(http::response_header<>& header, const char* type) {
  header.set(http::field::content_type, type);
  header.set(http::field::cache_control, "no-store");
  if (header.result() == http::status::unauthorized) {
    header.set(http::field::www_authenticate, "Bearer");
  }
  header.set("X-Content-Type-Options", "nosniff");
  header.set("Content-Security-Policy",
             "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
             "connect-src 'self'; img-src data:; frame-ancestors 'none'");
  if (header.result() == http::status::too_many_requests ||
      header.result() == http::status::service_unavailable) {
    header.set(http::field::retry_after, "1");
  }
}

/// A chunk of an answer in chunks.
std::string to_chunk(std::string_view bytes) {
  return fmt::format("{:x}\r\n{}\r\n", bytes.size(), bytes);
}

}  // namespace

std::string_view path_of(const HttpRequest& request) {
  std::string_view target(request.target().data(), request.target().size());
  if (target.starts_with("http://")) {  // the absolute form, as for proxies
    target.remove_prefix(std::min(target.find('/', 7), target.size()));
  }
  return target.substr(0, target.find('?'));
}

AwaitedRequests::Entry::Entry(AwaitedRequests& all, beast::tcp_stream& stream)
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

HttpConnection::HttpConnection(tcp::socket socket, std::shared_ptr<HttpClients> clients)
    : shared_(std::move(clients)),
      clients_(*shared_),
      counted_(clients_.count),
      stream_(std::move(socket)),
      buffer_(clients_.limits.header_bytes + clients_.limits.body_bytes) {
  ErrorCode ignored;
  stream_.socket().set_option(tcp::no_delay(true), ignored);
  stream_.socket().non_blocking(true, ignored);
}

net::awaitable<HttpConnection::Read> HttpConnection::read(const FindRefusal& find_refusal) {
  answered_bytes_.reset();
  probe_time_ = kProbeTime;
  next_probe_ = {};
  if (std::exchange(is_first_, false)) {  // no conditional expression of two types
    stream_.expires_after(kRequestTime);
  } else {
    stream_.expires_after(kIdleTime);
  }
  AwaitedRequests& all = clients_.awaited;
  std::optional<AwaitedRequests::Entry> awaited(std::in_place, all, stream_);
  http::request_parser<http::string_body> parser;
  parser.header_limit(uint32_t(clients_.limits.header_bytes));
  parser.body_limit(clients_.limits.body_bytes);
  auto [error, size] = co_await http::async_read_header(stream_, buffer_, parser, kAwait);
  Read read;
  read.refused = find_refusal(parser.get(), error);
  if (!error && !read.refused) {
    stream_.expires_after(kRequestTime);
    const bool is_asked = beast::iequals(parser.get()[http::field::expect], "100-continue");
    if (is_asked && parser.get().version() >= 11) {
      co_await net::async_write(stream_, net::buffer(kContinue), kAwait);
    }
    while (!error && !parser.is_done() && !awaited->is_refused()) {
      std::tie(error, size) = co_await http::async_read_some(stream_, buffer_, parser, kAwait);
      stream_.expires_after(kRequestTime);  // for the next part
      awaited->set_bytes(parser.get().body().size());
      const size_t bytes = all.bytes() + clients_.answered_bytes;
      if (bytes > clients_.limits.all_body_bytes) all.refuse_largest();
    }
    if (error) read.refused = find_refusal(parser.get(), error);
    if (awaited->is_refused()) read.refused = ApiError(503, "too many requests are being read");
  }
  read.is_whole = !error && !read.refused;
  read.request = parser.release();
  if (read.refused) read.request.body() = {};
  answered_bytes_.emplace(clients_.answered_bytes, read.request.body().size());
  co_return read;
}

net::awaitable<bool> HttpConnection::send(const HttpRequest& request, int status, const char* type,
                                          std::string_view text, bool keeps_alive) {
  http::response<http::span_body<const char>> response(http::status(status), request.version());
  set_fields(response, type);
  response.keep_alive(keeps_alive);
  response.content_length(text.size());
  if (request.method() != http::verb::head) response.body() = {text.data(), text.size()};
  if (response.result() == http::status::method_not_allowed) {
    response.set(http::field::allow, clients_.limits.methods(request));
  }
  http::response_serializer<http::span_body<const char>> serializer(response);
  ErrorCode error;
  while (!error && !serializer.is_done()) {
    stream_.expires_after(kWriteTime);
    size_t size = 0;
    std::tie(error, size) = co_await http::async_write_some(stream_, serializer, kAwait);
  }
  co_return !error && keeps_alive;
}

net::awaitable<bool> HttpConnection::write(std::string_view bytes) {
  ErrorCode error;
  for (size_t size = 0; !error && !bytes.empty(); bytes.remove_prefix(size)) {
    stream_.expires_after(kWriteTime);
    std::tie(error, size) = co_await stream_.async_write_some(net::buffer(bytes), kAwait);
  }
  co_return !error;
}

net::awaitable<bool> HttpConnection::begin_events(const HttpRequest& request, bool keeps_alive) {
  http::response<http::empty_body> header(http::status::ok, request.version());
  set_fields(header, "text/event-stream");
  header.keep_alive(keeps_alive);
  has_events_ = true;
  is_chunked_ = request.version() >= 11;
  header.chunked(is_chunked_);
  http::response_serializer<http::empty_body> serializer(header);
  stream_.expires_after(kWriteTime);
  const auto [error, size] = co_await http::async_write_header(stream_, serializer, kAwait);
  co_return !error;
}

net::awaitable<bool> HttpConnection::send_events(std::string_view events) {
  const std::string chunk = is_chunked_ ? to_chunk(events) : "";
  std::string_view bytes = is_chunked_ ? std::string_view(chunk) : events;
  // Mostly its socket has room for all of them: then nothing waits, and no timer runs.
  ErrorCode error;
  bytes.remove_prefix(stream_.socket().write_some(net::buffer(bytes), error));
  if (error && error != net::error::would_block) co_return false;
  co_return co_await write(bytes);
}

net::awaitable<bool> HttpConnection::end_events() {
  has_events_ = false;
  if (!is_chunked_) co_return false;  // the end of the connection ends the answer
  stream_.expires_after(kWriteTime);
  const auto [error, size] = co_await net::async_write(stream_, http::make_chunk_last(), kAwait);
  co_return !error;
}

net::awaitable<void> HttpConnection::await_change(const HttpRequest& request,
                                                  net::steady_timer& changed) {
  changed.expires_after(kWatchTime);
  const auto [cancelled] = co_await changed.async_wait(kAwait);
  if (cancelled) co_return;  // a client that has left is noticed by what is sent now
  const ClientState state = find_state(stream_.socket());
  if (state == ClientState::gone) is_gone_ = true;
  if (state != ClientState::half_closed || Clock::now() < next_probe_) co_return;
  next_probe_ = Clock::now() + probe_time_;
  probe_time_ *= 2;
  // Clients pass over comments, and over interim answers, which HTTP/1.0 does not have.
  std::string_view probe = request.version() >= 11 ? kContinue : "";
  if (has_events_) probe = is_chunked_ ? "3\r\n:\n\n\r\n" : ":\n\n";
  stream_.expires_after(kWriteTime);
  const auto [error, size] = co_await net::async_write(stream_, net::buffer(probe), kAwait);
  if (error) is_gone_ = true;
}

net::awaitable<void> HttpConnection::drop_input() {
  shutdown_send();
  std::vector<char> ignored(1 << 16);
  const size_t max_bytes = std::max(kMinDroppedBytes, 4 * clients_.limits.body_bytes);
  ErrorCode error;
  stream_.expires_after(kDropTime);
  for (size_t dropped = 0, size = 0; !error && dropped < max_bytes; dropped += size) {
    std::tie(error, size) = co_await stream_.async_read_some(net::buffer(ignored), kAwait);
  }
}

void HttpConnection::shutdown_send() {
  ErrorCode ignored;
  stream_.socket().shutdown(tcp::socket::shutdown_send, ignored);
}

}  // namespace tandem
