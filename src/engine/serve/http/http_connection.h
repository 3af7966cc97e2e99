// Connections of the program's HTTP servers: requests with bounds on their time and memory,
// answers, streams of events, and clients that leave. Needs Boost.
#pragma once

#include <boost/asio.hpp>
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "engine/serve/api_error.h"

namespace tandem {

using HttpRequest = boost::beast::http::request<boost::beast::http::string_body>;
/// Target of a request without its query.
std::string_view path_of(const HttpRequest& request);

/// Adds to a sum while coroutines are in a block.
struct ScopedCount {
  explicit ScopedCount(size_t& sum_, size_t added_ = 1) : sum(sum_), added(added_) { sum += added; }
  ScopedCount(const ScopedCount&) = delete;
  ScopedCount& operator=(const ScopedCount&) = delete;
  ~ScopedCount() { sum -= added; }
  size_t& sum;
  const size_t added;
};

/// Connections whose clients have yet to send a whole request, and the bytes of it that are held.
/// A client that says nothing makes room for others.
class AwaitedRequests {
 public:
  /// A connection, while it is awaited.
  class Entry {
   public:
    Entry(AwaitedRequests& all, boost::beast::tcp_stream& stream);
    ~Entry();
    Entry(const Entry&) = delete;
    Entry& operator=(const Entry&) = delete;
    void set_bytes(size_t bytes);
    /// Whether `refuse_largest` has chosen it.
    bool is_refused() const;

   private:
    AwaitedRequests& all_;
    const uint64_t number_;
  };

  /// Bytes of all requests that are awaited.
  size_t bytes() const { return bytes_; }
  /// Closes the connection that has waited longest; false if there is none.
  bool close_oldest();
  /// Ends reading the request that holds the most bytes, whose read then fails.
  void refuse_largest();

 private:
  struct Awaited {
    boost::beast::tcp_stream* stream;
    size_t bytes = 0;
    bool is_refused = false;
  };
  std::map<uint64_t, Awaited> awaited_;  ///< in the order in which they began to wait
  uint64_t next_ = 0;
  size_t bytes_ = 0;
};

struct HttpLimits {
  size_t clients;
  size_t header_bytes, body_bytes;
  size_t all_body_bytes;  ///< of all requests that are read or answered
  std::string_view (*methods)(const HttpRequest& request);  ///< Allow of an answer with status 405
};

/// Connections of one server.
struct HttpClients {
  explicit HttpClients(const HttpLimits& limits_) : limits(limits_) {}

  HttpLimits limits;
  size_t count = 0;
  size_t answered_bytes = 0;  ///< bodies of requests that are answered
  AwaitedRequests awaited;
};

/// One connection, in coroutines of its server's thread.
class HttpConnection {
 public:
  /// Reason to refuse a request whose header, or whole, was read with an error or none; nullopt
  /// also if the client has left.
  using FindRefusal =
      std::function<std::optional<ApiError>(const HttpRequest&, boost::system::error_code)>;

  HttpConnection(boost::asio::ip::tcp::socket socket, std::shared_ptr<HttpClients> clients);

  struct Read {
    HttpRequest request;              ///< its header, if it is refused
    std::optional<ApiError> refused;  ///< to be answered, with `drop_input` after it
    bool is_whole = false;            ///< false: the connection ends
  };
  boost::asio::awaitable<Read> read(const FindRefusal& find_refusal);

  /// Sends a whole answer; `text` must live that long. Returns whether the connection stays open.
  boost::asio::awaitable<bool> send(const HttpRequest& request, int status, const char* type,
                                    std::string_view text, bool keeps_alive);
  /// Begins an answer of server-sent events. False: the client has left, as for the next two.
  boost::asio::awaitable<bool> begin_events(const HttpRequest& request, bool keeps_alive);
  boost::asio::awaitable<bool> send_events(std::string_view events);
  /// Returns whether the connection stays open.
  boost::asio::awaitable<bool> end_events();

  /// Waits until `changed` is cancelled, at most for a while, and notices that the client has left.
  /// One that sends no more may still read: bytes that it ignores make a connection that is closed
  /// report so.
  boost::asio::awaitable<void> await_change(const HttpRequest& request,
                                            boost::asio::steady_timer& changed);
  bool is_gone() const { return is_gone_; }

  /// Reads the rest of a request that was refused, for a while, so that its client reads the answer
  /// and not an error of its connection.
  boost::asio::awaitable<void> drop_input();
  void shutdown_send();

 private:
  using Clock = std::chrono::steady_clock;
  /// Writes all; the client may take a while for each part of it, and as long as it likes in all.
  boost::asio::awaitable<bool> write(std::string_view bytes);

  const std::shared_ptr<HttpClients> shared_;  ///< a coroutine may be destroyed after its server
  HttpClients& clients_;
  const ScopedCount counted_;
  boost::beast::tcp_stream stream_;
  boost::beast::flat_buffer buffer_;
  std::optional<ScopedCount> answered_bytes_;
  bool is_first_ = true, is_chunked_ = false, has_events_ = false, is_gone_ = false;
  Clock::time_point next_probe_;
  Clock::duration probe_time_{};
};

}  // namespace tandem
