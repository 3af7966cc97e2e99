#include "cli/completion_server.h"

#include <fmt/format.h>

#include <algorithm>
#include <boost/asio.hpp>
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>
#include <chrono>
#include <map>
#include <optional>
#include <random>
#include <string_view>
#include <thread>
#include <utility>

#include "cli/http_listen.h"
#include "core/file_limit.h"
#include "core/printable.h"
#include "engine/serve/completion_answer.h"
#include "engine/serve/serve_metrics.h"
#include "engine/serve/serve_page.h"
#include "tandem/error.h"

namespace tandem::cli {
namespace {

namespace net = boost::asio;
namespace beast = boost::beast;
namespace http = boost::beast::http;
using net::ip::tcp;
using ErrorCode = boost::system::error_code;
using HttpRequest = http::request<http::string_body>;

constexpr size_t kMaxClients = 1024, kMaxHeaderBytes = 16 << 10, kMaxBodyBytes = 8 << 20;
constexpr size_t kMaxReadBytes = 256 << 20;  // of all bodies that are being read
constexpr std::chrono::seconds kRequestTime{30}, kWriteTime{30}, kIdleTime{75}, kCloseTime{5},
    kDropTime{2};
constexpr auto kAwait = net::as_tuple(net::use_awaitable);

/// Texts of one request, whose tokens arrive while its connection waits.
struct ActiveCompletion {
  ActiveCompletion(const net::any_io_executor& executor, CompletionAnswer answer_)
      : answer(std::move(answer_)), changed(executor, net::steady_timer::time_point::max()) {}

  CompletionAnswer answer;
  std::vector<int64_t> requests;
  std::string unsent;    ///< events of a stream
  bool is_gone = false;  ///< the client
  bool is_answered = false;
  bool has_token = false;
  std::chrono::steady_clock::time_point began = std::chrono::steady_clock::now();
  net::steady_timer changed;
};
using Completion = std::shared_ptr<ActiveCompletion>;

/// Compares in a time that does not depend on where they differ.
bool same_secret(std::string_view a, std::string_view b) {
  if (a.size() != b.size()) return false;
  unsigned difference = 0;
  for (size_t i = 0; i < a.size(); ++i) difference |= unsigned(uint8_t(a[i] ^ b[i]));
  return difference == 0;
}

std::string random_id() {
  static std::mt19937_64 random{std::random_device{}()};
  return fmt::format("{:016x}", random());
}

class BeastCompletionServer : public CompletionServer {
 public:
  explicit BeastCompletionServer(const CompletionServerOptions& options)
      : options_(options), acceptor_(listen_at(context_, options.address, "serve")) {
    raise_file_limit();
    const tcp::endpoint at = acceptor_.local_endpoint();
    is_local_ = at.address().is_loopback();
    url_ = url_of(at, options.address);
    net::co_spawn(context_, accept(), net::detached);
    thread_ = std::thread([this] { context_.run(); });
  }
  ~BeastCompletionServer() override {
    context_.stop();
    if (thread_.joinable()) thread_.join();
  }

  std::string url() const override { return url_; }
  bool is_local() const override { return is_local_; }

  void open(const ServedModel& model, ServeLoop& loop) override {
    net::post(context_, [this, &model, &loop] { model_ = &model, loop_ = &loop; });
  }

  void deliver(std::vector<TokenEvent> tokens) override {
    net::post(context_, [this, tokens = std::move(tokens)] {
      for (const TokenEvent& token : tokens) take(token);
    });
  }

  void close() override {
    const auto until = std::chrono::steady_clock::now() + kCloseTime;
    // Posted after the last tokens, so that their answers are counted.
    const auto are_sent = [&] {
      return net::post(context_, net::use_future([&] { return num_answering_ == 0; })).get();
    };
    while (!are_sent() && std::chrono::steady_clock::now() < until) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    context_.stop();
    thread_.join();
  }

 private:
  net::awaitable<void> accept() {
    while (true) {
      auto [error, socket] = co_await acceptor_.async_accept(kAwait);
      if (!error && num_clients_ < kMaxClients) {
        net::co_spawn(context_, talk(beast::tcp_stream(std::move(socket))), net::detached);
      } else if (error) {  // as for lack of descriptors, until a client has left
        net::steady_timer timer(context_, std::chrono::milliseconds(100));
        co_await timer.async_wait(kAwait);
      }
    }
  }

  /// The requests of one connection.
  net::awaitable<void> talk(beast::tcp_stream stream) {
    const Counted client(num_clients_);
    beast::flat_buffer buffer(kMaxHeaderBytes + kMaxBodyBytes);
    ErrorCode ignored;
    stream.socket().set_option(tcp::no_delay(true), ignored);
    stream.socket().non_blocking(true, ignored);  // for `watch`; others wait in the context
    stream.expires_after(kRequestTime);
    for (bool continues = true; continues;) {
      http::request_parser<http::string_body> parser;
      parser.header_limit(kMaxHeaderBytes);
      parser.body_limit(kMaxBodyBytes);
      auto [error, size] = co_await http::async_read_header(stream, buffer, parser, kAwait);
      Counted reading(read_bytes_, error ? 0 : body_bytes(parser));
      std::optional<ApiError> refused = refusal(parser.get(), error);
      if (!error && !refused) {
        stream.expires_after(kRequestTime);
        if (beast::iequals(parser.get()[http::field::expect], "100-continue")) {
          static constexpr std::string_view kContinue = "HTTP/1.1 100 Continue\r\n\r\n";
          co_await net::async_write(stream, net::buffer(kContinue), kAwait);
        }
        std::tie(error, size) = co_await http::async_read(stream, buffer, parser, kAwait);
        if (error) refused = refusal(parser.get(), error);
      }
      if (refused) {
        co_await refuse(stream, parser.get(), *refused, false);
        co_await drop_input(stream);
      }
      if (error || refused) break;
      const HttpRequest request = parser.release();
      reading.set(request.body().size());
      const Counted answering(num_answering_);
      continues = co_await answer(stream, request);
      stream.expires_after(kIdleTime);
    }
    stream.socket().shutdown(tcp::socket::shutdown_send, ignored);
  }

  /// Ends a completion with a block, also by an exception.
  struct Forgotten {
    ~Forgotten() { server.forget(completion); }
    BeastCompletionServer& server;
    const Completion completion;
  };

  /// Adds to a sum while coroutines are in a block.
  struct Counted {
    explicit Counted(size_t& sum_, size_t added_ = 1) : sum(sum_), added(added_) { sum += added; }
    Counted(const Counted&) = delete;
    ~Counted() { sum -= added; }
    void set(size_t changed) {
      sum += changed - added;
      added = changed;
    }
    size_t& sum;
    size_t added;
  };

  /// Max bytes of the body that follows a header.
  static size_t body_bytes(const http::request_parser<http::string_body>& parser) {
    return parser.chunked() ? kMaxBodyBytes : parser.content_length().value_or(0);
  }

  static std::string_view path_of(const HttpRequest& request) {
    const std::string_view target(request.target().data(), request.target().size());
    return target.substr(0, target.find('?'));
  }

  /// Reason to refuse a request whose header, or whole, was read with `error`; nullopt also if the
  /// client has left.
  std::optional<ApiError> refusal(const HttpRequest& request, ErrorCode error) const {
    if (error == http::error::body_limit || error == http::error::header_limit) {
      return ApiError(error == http::error::body_limit ? 413 : 431,
                      fmt::format("request: expected at most {} bytes of header and {} of body",
                                  kMaxHeaderBytes, kMaxBodyBytes));
    }
    if (error == http::error::end_of_stream || error == http::error::partial_message) return {};
    if (error.category() == make_error_code(http::error::bad_version).category()) {
      return ApiError(400, fmt::format("request: {}", error.message()));
    }
    if (error) return {};
    // Beast passes over codings that it does not know, and would read the body as a request.
    if (request.count(http::field::transfer_encoding) > 0 && !request.chunked()) {
      return ApiError(501, "Transfer-Encoding: expected chunked");
    }
    if (read_bytes_ > kMaxReadBytes) return ApiError(503, "too many requests are being read");
    try {
      check_client(request);
    } catch (const ApiError& refused) {
      return refused;
    }
    return {};
  }

  /// Reads what is left of a request that was refused, for a while, so that its client reads the
  /// answer and not an error of its connection.
  static net::awaitable<void> drop_input(beast::tcp_stream& stream) {
    ErrorCode error;
    stream.socket().shutdown(tcp::socket::shutdown_send, error);
    std::vector<char> ignored(1 << 16);
    size_t dropped = 0;
    stream.expires_after(kDropTime);
    while (!error && dropped < 4 * kMaxBodyBytes) {
      size_t size = 0;
      std::tie(error, size) = co_await stream.async_read_some(net::buffer(ignored), kAwait);
      dropped += size;
    }
  }

  /// Whether the connection remains open.
  net::awaitable<bool> answer(beast::tcp_stream& stream, const HttpRequest& request) {
    const std::string_view path = path_of(request);
    std::optional<ApiError> refused;  // co_await is not allowed in a handler
    std::string text;
    const char* type = "application/json";
    try {
      const bool is_chat = path == "/v1/chat/completions";
      if (is_chat || path == "/v1/completions") {
        require(request, http::verb::post);
        const CompletionRequest parsed = parse_completion(model(), request.body(), is_chat);
        const Completion completion = submit(parsed);
        stream.expires_never();
        watch(stream.socket(), completion);
        const Forgotten forgotten{*this, completion};
        bool is_sent = false;
        if (parsed.streams) {
          is_sent = co_await send_stream(stream, request, completion);
        } else {
          is_sent = co_await send_whole(stream, request, completion);
        }
        co_return is_sent&& request.keep_alive();
      }
      if (path == "/tokenize") {
        require(request, http::verb::post);
        text = answer_tokenize(model(), request.body());
      } else {
        if (request.method() != http::verb::head) require(request, http::verb::get);
        if (path == "/") {
          type = "text/html; charset=utf-8";
          text = serve_page();
        } else if (path == "/health") {
          model();
          require_open();
          text = R"({"status":"ok"})";
        } else if (path == "/v1/models") {
          text = models_json(model());
        } else if (path == "/metrics") {
          type = "text/plain; version=0.0.4";
          text = metrics_.text(loop_ ? loop_->stats() : ServeLoop::Stats{});
        } else {
          throw ApiError(404, fmt::format("{}: no such path", printable(path)));
        }
      }
    } catch (const ApiError& error) {
      refused = error;
    } catch (const std::exception& error) {
      refused = ApiError(500, error.what());
    }
    if (refused) co_return co_await refuse(stream, request, *refused, request.keep_alive());
    co_return co_await send(stream, request, http::status::ok, type, text, request.keep_alive());
  }

  const ServedModel& model() const {
    if (!model_) throw ApiError(503, "the model is being loaded");
    return *model_;
  }

  void require_open() const {
    if (loop_->is_ending()) throw ApiError(503, "the server is ending");
  }

  static void require(const HttpRequest& request, http::verb verb) {
    if (request.method() == verb) return;
    const std::string_view expected = verb == http::verb::get ? "GET" : "POST";
    throw ApiError(405, fmt::format("expected {}", expected));
  }

  /// By the header.
  void check_client(const HttpRequest& request) const {
    const std::string_view path = path_of(request);
    const auto host = request[http::field::host];
    if (is_local_ && !is_local_host({host.data(), host.size()}, options_.address.host)) {
      throw ApiError(403, "unknown host name");
    }
    // A page of another site may send a request without asking, though not read the answer.
    const auto origin = request[http::field::origin];
    std::string_view site(origin.data(), origin.size());
    if (const size_t scheme = site.find("://"); scheme != site.npos) site.remove_prefix(scheme + 3);
    if (is_local_ && !origin.empty() && !is_local_host(site, options_.address.host)) {
      throw ApiError(403, "a page of another site");
    }
    if (options_.key.empty() || path == "/" || path == "/health") return;
    const auto header = request[http::field::authorization];
    if (!same_secret({header.data(), header.size()}, "Bearer " + options_.key)) {
      throw ApiError(401, "Authorization: expected the server's key as a bearer token", "",
                     "invalid_api_key");
    }
  }

  Completion submit(const CompletionRequest& parsed) {
    const auto completion = std::make_shared<ActiveCompletion>(
        context_.get_executor(), CompletionAnswer(*model_, parsed, random_id()));
    if (const auto texts = int64_t(parsed.choices.size()); texts > loop_->max_unfinished()) {
      throw ApiError(400, fmt::format("{} texts: expected at most {} at once", texts,
                                      loop_->max_unfinished()));
    }
    completion->requests = loop_->submit(parsed.choices);
    if (completion->requests.empty()) require_open();
    if (completion->requests.empty())
      throw ApiError(429, "too many requests wait: try again later");
    for (size_t i = 0; i < completion->requests.size(); ++i) {
      active_[completion->requests[i]] = {completion, i};
    }
    metrics_.begin(parsed.prompt_tokens);
    completion->unsent = completion->answer.begin();
    return completion;
  }

  void take(const TokenEvent& token) {
    const auto found = active_.find(token.request);
    if (found == active_.end()) return;  // cancelled meanwhile
    const auto [completion, choice] = found->second;
    if (!std::exchange(completion->has_token, true)) {
      const std::chrono::duration<double> waited =
          std::chrono::steady_clock::now() - completion->began;
      metrics_.add_first_token(waited.count());
    }
    metrics_.add_token();
    completion->unsent += completion->answer.add(choice, token);
    if (token.finish) active_.erase(found);
    completion->changed.cancel();
  }

  /// Notices that the client leaves.
  static void watch(tcp::socket& socket, const Completion& completion) {
    socket.async_wait(tcp::socket::wait_read, [&socket, completion](ErrorCode error) {
      if (error || completion->is_answered) return;  // the connection may be closed, and `socket`
      char byte;
      if (socket.receive(net::buffer(&byte, 1), tcp::socket::message_peek, error) > 0) return;
      if (error == net::error::would_block) return watch(socket, completion);
      completion->is_gone = true;
      completion->changed.cancel();
    });
  }

  /// Cancels what is unfinished.
  void forget(const Completion& completion) {
    completion->is_answered = true;
    for (const int64_t request : completion->requests) {
      if (active_.erase(request) > 0) loop_->cancel(request);
    }
    metrics_.end(completion->answer.is_done());
  }

  net::awaitable<bool> send_whole(beast::tcp_stream& stream, const HttpRequest& request,
                                  Completion completion) {
    while (!completion->answer.is_done() && !completion->is_gone) {
      co_await completion->changed.async_wait(kAwait);
    }
    if (completion->is_gone) co_return false;
    co_return co_await send(stream, request, http::status::ok, "application/json",
                            completion->answer.whole(), request.keep_alive());
  }

  net::awaitable<bool> send_stream(beast::tcp_stream& stream, const HttpRequest& request,
                                   Completion completion) {
    http::response<http::empty_body> header(http::status::ok, request.version());
    set_fields(header, "text/event-stream", request.keep_alive());
    const bool is_chunked = request.version() >= 11;
    header.chunked(is_chunked);
    http::response_serializer<http::empty_body> serializer(header);
    stream.expires_after(kWriteTime);
    auto [error, size] = co_await http::async_write_header(stream, serializer, kAwait);
    while (!error && !completion->is_gone) {
      const bool is_done = completion->answer.is_done();
      std::string events = std::exchange(completion->unsent, {});
      if (is_done) events += completion->answer.end();
      if (!events.empty()) {
        stream.expires_after(kWriteTime);
        const net::const_buffer bytes = net::buffer(events);
        if (is_chunked) {  // no conditional expression: GCC 12 would await both
          std::tie(error, size) =
              co_await net::async_write(stream, http::make_chunk(bytes), kAwait);
        } else {
          std::tie(error, size) = co_await net::async_write(stream, bytes, kAwait);
        }
      }
      if (is_done) break;
      if (!error && completion->unsent.empty()) {
        stream.expires_never();
        co_await completion->changed.async_wait(kAwait);
      }
    }
    if (error || completion->is_gone) co_return false;
    if (!is_chunked) co_return false;  // the end of the connection ends the answer
    std::tie(error, size) = co_await net::async_write(stream, http::make_chunk_last(), kAwait);
    co_return !error;
  }

  net::awaitable<bool> refuse(beast::tcp_stream& stream, const HttpRequest& request,
                              const ApiError& error, bool keeps_alive) {
    metrics_.refuse();
    co_return co_await send(stream, request, http::status(error.status), "application/json",
                            error.json(), keeps_alive);
  }

  template <typename Response>
  static void set_fields(Response& response, const char* type, bool keeps_alive) {
    response.set(http::field::content_type, type);
    response.set(http::field::cache_control, "no-store");
    response.set("X-Content-Type-Options", "nosniff");
    response.set("Content-Security-Policy",
                 "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
                 "connect-src 'self'; img-src data:; frame-ancestors 'none'");
    if (response.result() == http::status::too_many_requests ||
        response.result() == http::status::service_unavailable) {
      response.set(http::field::retry_after, "1");
    }
    response.keep_alive(keeps_alive);
  }

  net::awaitable<bool> send(beast::tcp_stream& stream, const HttpRequest& request,
                            http::status status, const char* type, std::string text,
                            bool keeps_alive) {
    http::response<http::string_body> response(status, request.version());
    set_fields(response, type, keeps_alive);
    if (status == http::status::method_not_allowed) response.set(http::field::allow, "GET, POST");
    response.body() = std::move(text);
    response.prepare_payload();
    if (request.method() == http::verb::head) response.body().clear();  // not its length
    stream.expires_after(kWriteTime);
    const auto [error, size] = co_await http::async_write(stream, response, kAwait);
    co_return !error && keeps_alive;
  }

  const CompletionServerOptions options_;
  size_t num_clients_ = 0, num_answering_ = 0, read_bytes_ = 0;
  ServeMetrics metrics_;
  net::io_context context_{1};  // destroys coroutines, which use the members above
  tcp::acceptor acceptor_;
  bool is_local_ = false;
  std::string url_;
  const ServedModel* model_ = nullptr;
  ServeLoop* loop_ = nullptr;
  std::map<int64_t, std::pair<Completion, size_t>> active_;  // choices that are unfinished
  std::thread thread_;
};

}  // namespace

std::unique_ptr<CompletionServer> start_completion_server(const CompletionServerOptions& options) {
  return std::make_unique<BeastCompletionServer>(options);
}

}  // namespace tandem::cli
