#include "engine/serve/http/live_server.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <boost/asio.hpp>
#include <boost/beast/http.hpp>
#include <chrono>
#include <deque>
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
namespace http = boost::beast::http;
using ErrorCode = boost::system::error_code;
using Text = std::shared_ptr<const std::string>;
using Json = report::LiveRun::Json;
using LiveClock = std::chrono::steady_clock;

constexpr HttpLimits kLimits{
    .clients = 64,
    .header_bytes = 8192,
    .body_bytes = 0,
    .all_body_bytes = 1 << 20,
    .methods = [](const HttpRequest&) -> std::string_view { return "GET, HEAD"; }};
constexpr std::chrono::milliseconds kMinRefresh{500}, kKeepAlive{5000}, kLastEvents{1000};
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
  explicit LivePages(const LiveServerOptions& options)
      : run_(options.dir, read_run_goal), page_(make_text(live_page())) {
    run_.refresh();
    for (const std::string& other : options.others) others_.emplace_back(other, read_run_goal);
    for (report::LiveRun& other : others_) other.refresh();
    make_state();
  }

  /// Whether there is a new state, which `is_last` makes in any case.
  bool refresh(bool is_last = false) {
    const bool is_due = is_last || LiveClock::now() - made_ >= kKeepAlive;
    bool has_changed = run_.refresh();
    for (report::LiveRun& other : others_) has_changed |= other.refresh();
    if (!has_changed && !is_due) return false;
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
    Json state = run_.state();
    state["others"] = Json::array();
    for (const report::LiveRun& other : others_) state["others"].push_back(other.curves());
    state_ = make_text(to_text(state));
    event_ = make_text("data: " + *state_ + "\n\n");
    ranks_.reset();
    metrics_.reset();
  }

  report::LiveRun run_;
  std::deque<report::LiveRun> others_;
  LiveClock::time_point made_;
  Text page_, state_, event_, ranks_, metrics_;
};

/// Client that reads events: the latest that it has, and what wakes its connection.
struct Listener {
  explicit Listener(const net::any_io_executor& executor) : changed(executor) {}
  Text sent;
  net::steady_timer changed;
};

class LiveServer {
 public:
  explicit LiveServer(const LiveServerOptions& options)
      : options_(options),
        pages_(options),
        listener_(context_, options.address, "live page", kLimits,
                  [this](HttpConnection& connection) { return talk(connection); }) {
    complain(fmt::format("Live page of {}: {}{}", single_line(options.dir), listener_.url(),
                         listener_.is_local() ? "" : ", for everyone who reaches this machine"));
  }

  void run() {
    net::signal_set signals(context_, SIGINT, SIGTERM);
    signals.async_wait([this](const ErrorCode&, int) {
      push(true);
      stop_once_sent(LiveClock::now() + kLastEvents);
    });
    listener_.start();
    refresh();
    context_.run();
  }

 private:
  /// One connection, with one request.
  net::awaitable<void> talk(HttpConnection& connection) {
    const HttpConnection::FindRefusal find = [this](const HttpRequest& request, ErrorCode error) {
      return find_refusal(request, error);
    };
    const HttpConnection::Read read = co_await connection.read(find);
    if (read.refused) {
      const std::string text = std::string(read.refused->what()) + "\n";
      co_await connection.send(read.request, read.refused->status, "text/plain", text, false);
    } else if (read.is_whole && path_of(read.request) == "/events") {
      co_await send_events(connection, read.request);
    } else if (read.is_whole) {
      const auto [status, type, text] = find_page(path_of(read.request));
      co_await connection.send(read.request, status, type, *text, false);
    }
    if (read.refused || read.is_whole) co_await connection.drop_input();
  }

  std::optional<ApiError> find_refusal(const HttpRequest& request, ErrorCode error) const {
    if (error && error != http::error::body_limit) return {};
    const bool is_get = request.method() == http::verb::get;
    if (!is_get && request.method() != http::verb::head) return ApiError(405, "only GET");
    if (error) return ApiError(413, "expected no body");
    if (!is_get && path_of(request) == "/events") return ApiError(404, "not found");
    return listener_.find_refusal(request);
  }

  struct Page {
    int status;
    const char* type;
    Text text;
  };
  Page find_page(std::string_view path) {
    if (path == "/") return {200, "text/html; charset=utf-8", pages_.page()};
    if (path == "/state.json") return {200, "application/json", pages_.state()};
    if (path == "/ranks.json") return {200, "application/json", pages_.ranks()};
    if (path == "/metrics") return {200, "text/plain; version=0.0.4", pages_.metrics()};
    return {404, "text/plain", make_text("not found\n")};
  }

  /// Sends the latest event whenever there is a new one: a slow client misses events, and needs no
  /// queue.
  net::awaitable<void> send_events(HttpConnection& connection, const HttpRequest& request) {
    Listener listener(context_.get_executor());
    bool is_sent = co_await connection.begin_events(request, false);
    if (is_sent) listeners_.insert(&listener);
    while (is_sent && !connection.is_gone()) {
      if (listener.sent == pages_.event()) {
        co_await connection.await_change(request, listener.changed);
      } else {
        const Text event = pages_.event();
        is_sent = co_await connection.send_events(*event);
        listener.sent = event;
      }
    }
    listeners_.erase(&listener);
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
    for (Listener* listener : listeners_) listener->changed.cancel();
  }

  /// Ends once all that listen have the last state, or at the deadline.
  void stop_once_sent(LiveClock::time_point deadline) {
    const bool is_sent = std::ranges::all_of(
        listeners_, [&](const Listener* each) { return each->sent == pages_.event(); });
    if (is_sent || LiveClock::now() >= deadline) return context_.stop();
    end_.expires_after(std::chrono::milliseconds(10));
    end_.async_wait([this, deadline](const ErrorCode&) { stop_once_sent(deadline); });
  }

  const LiveServerOptions options_;
  LivePages pages_;
  std::set<Listener*> listeners_;
  net::io_context context_{1};  // destroys coroutines, which use the members above
  net::steady_timer timer_{context_}, end_{context_};
  HttpListener listener_;
};

}  // namespace

void serve_live(const LiveServerOptions& options) {
  LiveServer(options).run();
}

}  // namespace tandem
