// Parts that the program's HTTP servers share. Needs Boost.
#pragma once

#include <boost/asio.hpp>
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "engine/serve/http/listen_address.h"

namespace tandem {

/// Socket that listens at `address`. Throws IoError that begins with `name`.
boost::asio::ip::tcp::acceptor listen_at(boost::asio::io_context& context,
                                         const ListenAddress& address, std::string_view name);

/// URL of a listening socket, with the typed host if it listens at all addresses.
std::string url_of(const boost::asio::ip::tcp::endpoint& at, const ListenAddress& typed);

/// Whether the host of a request is an address of this machine's loopback, localhost or the `typed`
/// one: a page of another site may give its name such an address, and its scripts must not read
/// what is served.
bool is_local_host(std::string_view host, std::string_view typed);

/// Status and text of a refusal.
struct HttpRefusal {
  int status;
  const char* text;
};
/// Reason to refuse a request by its Host fields: several, or, if `is_local`, one that is not
/// local.
std::optional<HttpRefusal> find_host_refusal(const boost::beast::http::fields& fields,
                                             bool is_local, std::string_view typed);

/// Sets the fields of every answer.
void set_answer_fields(boost::beast::http::fields& fields, const char* type);

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

}  // namespace tandem
