#include "engine/serve/http/live_server.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <boost/asio.hpp>
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>
#include <chrono>
#include <memory>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include "core/system/console.h"
#include "core/system/json.h"
#include "core/system/printable.h"
#include "engine/plan/goal.h"
#include "engine/report/live_run.h"
#include "engine/report/page_text.h"
#include "engine/serve/http/http_listen.h"
#include "tandem/error.h"

namespace tandem {
namespace {

namespace net = boost::asio;
namespace beast = boost::beast;
namespace http = boost::beast::http;
using net::ip::tcp;
using ErrorCode = boost::system::error_code;
using Text = std::shared_ptr<const std::string>;
using Json = report::LiveRun::Json;
using LiveClock = std::chrono::steady_clock;

constexpr size_t kMaxClients = 64, kMaxRequestBytes = 8192, kMaxDroppedBytes = 1 << 20;
constexpr std::chrono::milliseconds kRequestTime{15000}, kWriteTime{30000}, kDropTime{2000},
    kMinRefresh{500}, kKeepAlive{5000}, kLastEvents{1000};
constexpr int kRestPerWork = 10;  // time between readings of files over that of a reading

Text make_text(std::string text) {
  return std::make_shared<const std::string>(std::move(text));
}
std::string to_text(const Json& json) {
  return dump_json(json);
}

/// The run and its answers, each made once for all clients.
class LivePages {
 public:
  explicit LivePages(const std::string& dir)
      : run_(dir, read_run_goal), page_(make_text(live_page())) {
    run_.refresh();
    make_state();
  }

  /// Whether there is a new state, which `is_last` makes in any case.
  bool refresh(bool is_last = false) {
    const bool is_due = is_last || LiveClock::now() - made_ >= kKeepAlive;
    if (!run_.refresh() && !is_due) return false;
    make_state();
    return true;
  }
  Text page() const { return page_; }
  Text state() const { return state_; }
  Text event() const { return event_; }
  Text ranks() {
    if (!ranks_) ranks_ = make_text(to_text(run_.ranks()));
    return ranks_;
  }
  Text metrics() {
    if (!metrics_) metrics_ = make_text(run_.metrics());
    return metrics_;
  }

 private:
  void make_state() {
    made_ = LiveClock::now();
    state_ = make_text(to_text(run_.state()));
    event_ = make_text("data: " + *state_ + "\n\n");
    ranks_.reset();
    metrics_.reset();
  }

  report::LiveRun run_;
  LiveClock::time_point made_;
  Text page_, state_, event_, ranks_, metrics_;
};

class LiveClient;

/// Clients that wait for events, those that have yet to ask, and the number of all.
struct LiveClients {
  std::set<LiveClient*> listening;
  AwaitedRequests awaited;
  size_t count = 0;
};

/// One connection, with one request.
class LiveClient : public std::enable_shared_from_this<LiveClient> {
 public:
  LiveClient(tcp::socket socket, LivePages& pages, LiveClients& clients,
             const LiveServerOptions& options, bool is_local)
      : stream_(std::move(socket)),
        pages_(pages),
        clients_(clients),
        host_(options.address.host),
        is_local_(is_local),
        awaited_(std::in_place, clients.awaited, stream_) {
    ++clients_.count;
  }
  ~LiveClient() {
    clients_.listening.erase(this);
    --clients_.count;
  }

  void start() {
    request_.header_limit(kMaxRequestBytes);
    request_.body_limit(boost::none);  // it is not read
    stream_.expires_after(kRequestTime);
    http::async_read_header(stream_, buffer_, request_,
                            [self = shared_from_this()](const ErrorCode& error, size_t) {
                              if (!error) self->answer();
                            });
  }

  /// Sends the latest event, unless one is under way or it has been sent: a slow client misses
  /// events, and needs no queue.
  void push() {
    if (is_writing_ || sent_ == pages_.event()) return;
    is_writing_ = true;
    sent_ = pages_.event();
    stream_.expires_after(kWriteTime);
    net::async_write(stream_, net::buffer(*sent_),
                     [self = shared_from_this()](const ErrorCode& error, size_t) {
                       self->is_writing_ = false;
                       if (error) return self->close();
                       self->stream_.expires_never();
                       self->push();
                     });
  }

  bool is_writing() const { return is_writing_; }

  void close() {
    clients_.listening.erase(this);
    ErrorCode ignored;
    stream_.socket().close(ignored);
  }

 private:
  void answer() {
    awaited_.reset();
    const auto& request = request_.get();
    const bool is_head = request.method() == http::verb::head;
    if (request.method() != http::verb::get && !is_head) {
      return send(http::status::method_not_allowed, "text/plain", make_text("only GET\n"), false);
    }
    if (const auto refusal = find_host_refusal(request, is_local_, host_)) {
      return send(http::status(refusal->status), "text/plain",
                  make_text(std::string(refusal->text) + "\n"), is_head);
    }
    const std::string_view target(request.target().data(), request.target().size());
    const std::string_view path = target.substr(0, target.find('?'));
    const auto ok = [&](const char* type, Text text) {
      send(http::status::ok, type, std::move(text), is_head);
    };
    if (path == "/") return ok("text/html; charset=utf-8", pages_.page());
    if (path == "/state.json") return ok("application/json", pages_.state());
    if (path == "/ranks.json") return ok("application/json", pages_.ranks());
    if (path == "/metrics") return ok("text/plain; version=0.0.4", pages_.metrics());
    if (path == "/events" && !is_head) return listen();
    send(http::status::not_found, "text/plain", make_text("not found\n"), is_head);
  }

  void set_fields(const char* type) {
    set_answer_fields(header_, type);
    header_.set(http::field::connection, "close");
  }

  void send(http::status status, const char* type, Text text, bool is_head) {
    header_ = {status, 11};
    set_fields(type);
    header_.content_length(text->size());
    body_ = is_head ? make_text("") : std::move(text);
    write_header([self = shared_from_this()] {
      net::async_write(self->stream_, net::buffer(*self->body_),
                       [self](const ErrorCode&, size_t) { self->finish(); });
    });
  }

  void listen() {
    header_ = {http::status::ok, 11};
    set_fields("text/event-stream");
    write_header([self = shared_from_this()] {
      self->clients_.listening.insert(self.get());
      self->watch_for_end();
      self->push();
    });
  }

  template <typename Then>
  void write_header(Then then) {
    serializer_.emplace(header_);
    stream_.expires_after(kWriteTime);
    http::async_write_header(stream_, *serializer_,
                             [self = shared_from_this(), then](const ErrorCode& error, size_t) {
                               if (!error) then();
                             });
  }

  /// A client that listens has no more to say; it is forgotten when it closes.
  void watch_for_end() {
    stream_.expires_never();
    stream_.async_read_some(
        net::buffer(ignored_),
        [self = shared_from_this()](const ErrorCode&, size_t) { self->close(); });
  }

  void finish() {
    ErrorCode ignored;
    stream_.socket().shutdown(tcp::socket::shutdown_send, ignored);
    stream_.expires_after(kDropTime);
    drop_input(kMaxDroppedBytes);
  }

  /// Reads what else the client sends, as the body of a request that was refused, for a while: a
  /// connection that is closed with unread bytes may lose its answer.
  void drop_input(size_t left) {
    stream_.async_read_some(net::buffer(ignored_),
                            [self = shared_from_this(), left](const ErrorCode& error, size_t size) {
                              if (!error && size < left) self->drop_input(left - size);
                            });
  }

  beast::tcp_stream stream_;
  LivePages& pages_;
  LiveClients& clients_;
  const std::string& host_;  ///< as typed
  const bool is_local_;      ///< only this machine can connect
  std::optional<AwaitedRequests::Entry> awaited_;
  beast::flat_buffer buffer_{kMaxRequestBytes};
  http::request_parser<http::empty_body> request_;
  http::response<http::empty_body> header_;
  std::optional<http::response_serializer<http::empty_body>> serializer_;
  Text body_, sent_;
  char ignored_[4096];
  bool is_writing_ = false;
};

class LiveServer {
 public:
  explicit LiveServer(const LiveServerOptions& options)
      : options_(options),
        pages_(options.dir),
        acceptor_(listen_at(context_, options.address, "live page")),
        timer_(context_) {
    const tcp::endpoint at = acceptor_.local_endpoint();
    is_local_ = at.address().is_loopback();
    complain(fmt::format("Live page of {}: {}{}", single_line(options.dir),
                         url_of(at, options.address),
                         is_local_ ? "" : ", for everyone who reaches this machine"));
  }

  void run() {
    net::signal_set signals(context_, SIGINT, SIGTERM);
    signals.async_wait([this](const ErrorCode&, int) {
      push(true);
      stop_once_sent(LiveClock::now() + kLastEvents);
    });
    accept();
    refresh();
    context_.run();
  }

 private:
  void accept() {
    acceptor_.async_accept([this](const ErrorCode& error, tcp::socket socket) {
      const bool has_room =
          (!error && clients_.count < kMaxClients) || clients_.awaited.close_oldest();
      if (!error && has_room) {
        std::make_shared<LiveClient>(std::move(socket), pages_, clients_, options_, is_local_)
            ->start();
      }
      if (error && acceptor_.is_open()) {  // as for lack of descriptors, until a client has left
        retry_.expires_after(kMinRefresh);
        return retry_.async_wait([this](const ErrorCode&) { accept(); });
      }
      if (acceptor_.is_open()) accept();
    });
  }

  void refresh() {
    if (options_.parent != 0 && ::getppid() != options_.parent) return context_.stop();
    const auto begin = LiveClock::now();
    push(false);
    const auto rest = kRestPerWork * (LiveClock::now() - begin);
    timer_.expires_after(std::max<LiveClock::duration>(kMinRefresh, rest));
    timer_.async_wait([this](const ErrorCode& error) {
      if (!error) refresh();
    });
  }

  void push(bool is_last) {
    if (!pages_.refresh(is_last)) return;
    const std::set<LiveClient*> listening = clients_.listening;
    for (LiveClient* client : listening) client->push();
  }

  /// Ends once all that listen have the last state, or at the deadline.
  void stop_once_sent(LiveClock::time_point deadline) {
    const bool is_sent = std::ranges::none_of(clients_.listening, &LiveClient::is_writing);
    if (is_sent || LiveClock::now() >= deadline) return context_.stop();
    end_.expires_after(std::chrono::milliseconds(10));
    end_.async_wait([this, deadline](const ErrorCode&) { stop_once_sent(deadline); });
  }

  LiveServerOptions options_;
  LivePages pages_;
  LiveClients clients_;
  net::io_context context_{1};  // destroys handlers, and with them clients
  tcp::acceptor acceptor_;
  net::steady_timer timer_, retry_{context_}, end_{context_};
  bool is_local_ = false;
};

}  // namespace

void serve_live(const LiveServerOptions& options) {
  LiveServer(options).run();
}

}  // namespace tandem
